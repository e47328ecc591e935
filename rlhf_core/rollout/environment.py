"""The environment of a sampler's process. Loads without torch, since whoever starts the process needs it."""


def sampler_environment(threads: int = 1) -> dict[str, str]:
    """Environment of a sampler's process. It has to be there before vLLM, torch or numpy are imported.

    threads: OpenMP threads on the CPU; the number enters the bits.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}; give 1 or more")
    return {
        "OMP_NUM_THREADS": str(threads),
        # Bound to cores, the threads of two engines on one machine would share the first core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The engine core lives in this process: its owner steps it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        # Its warnings come once a tensor and update when the trainer's dtype is not the sampler's.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
