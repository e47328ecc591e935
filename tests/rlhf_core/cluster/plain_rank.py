"""The class that Ray's actors hold in these tests; they find this module through the driver's sys.path."""

import os
import time


class PlainRank:
    def __init__(self, rank: int):
        self.rank = rank

    def seen(self, *args: object, word: str = "") -> tuple[object, ...]:
        return self.rank, args, word, os.environ["OMP_NUM_THREADS"], os.environ["GIVEN"]

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def fail(self, rank: int) -> str:
        """`rank` fails, and its peers wait for it."""
        if self.rank != rank:
            time.sleep(300)
        raise ValueError(f"row 7 of rank {rank}\nis bad")

    def sleep(self, seconds: dict[int, float]) -> str:
        time.sleep(seconds[self.rank])
        return "awake"

    def open_store(self) -> int:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        return self.store.port

    def join(self, port: int) -> None:
        import torch.distributed as dist

        store = self.store if self.rank == 0 else dist.TCPStore("127.0.0.1", port, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)

    def all_reduce(self) -> float:
        """Rank 1 comes late to it, so rank 0 waits inside."""
        import torch
        import torch.distributed as dist

        if self.rank == 1:
            time.sleep(300)
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()
