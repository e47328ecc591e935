"""What a trainer rank does to its process before and around training: torch.distributed, threads, RNG."""

import hashlib
import ipaddress
import os
import resource
import socket
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def accelerator() -> Any:
    """DeepSpeed's accelerator: the GPU's, or the CPU's under DS_ACCELERATOR=cpu."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def open_rendezvous(host: str, ranks: int) -> TCPStore:
    """A store on a port that the kernel chooses: nobody else can take it in between. Rank 0 calls this.

    Left to itself it would listen on every interface; here on that of `host` alone.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def join(rank: int, ranks: int, host: str, port: int, store: TCPStore | None = None) -> None:
    """Joins the process group as `rank` of `ranks`, through rank 0's store at host:port."""
    import deepspeed

    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR=host, MASTER_PORT=str(port))
    os.environ.setdefault("LOCAL_RANK", "0")
    if ipaddress.ip_address(host).is_loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would listen on the address that the host name stands for
    store = store or TCPStore(host, port, ranks, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    on_cpu = accelerator().device_name() == "cpu"
    backend = "gloo" if on_cpu else accelerator().communication_backend_name()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=COLLECTIVE_TIMEOUT)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def first_on_node() -> int:
    """The lowest of the ranks on this rank's node. Every rank calls it."""
    here = socket.gethostname(), uuid.getnode()  # containers of one machine by name, machines of one name by address
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, here)
    return nodes.index(here)


def peak_memory_gib() -> dict[str, float]:
    """Most that this process has had so far, GiB: resident, and of its accelerator where it has one."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
    if accelerator().device_name() == "cpu":
        return {"resident_gib": resident}
    return {"resident_gib": resident, "accelerator_gib": accelerator().max_memory_allocated() / 2**30}


def barrier() -> None:
    dist.barrier()


def make_deterministic() -> None:
    """From here on only kernels that give the same bits each time; an operation without one raises RuntimeError.

    To be called before the first use of CUDA, which reads the variables then.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers hands it on
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def save_rng(directory: Path, rank: int) -> None:
    """torch's generator states of this rank; all other randomness is derived from seeds and positions."""
    states = {"cpu": torch.get_rng_state(), "device": accelerator().get_rng_state()}
    save_file(states, directory / f"rng-{rank}.safetensors")


def load_rng(directory: Path, rank: int) -> None:
    """The states that this rank saved; a rank that was not there takes a seed from rank 0's state and its number."""
    path = directory / f"rng-{rank}.safetensors"
    if path.exists():
        states = load_file(path)
        torch.set_rng_state(states["cpu"])
        accelerator().set_rng_state(states["device"])
    else:
        first = load_file(directory / "rng-0.safetensors")["cpu"].numpy().tobytes()
        digest = hashlib.sha256(first + rank.to_bytes(8, "big")).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
