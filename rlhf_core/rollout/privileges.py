"""What a process gives up so that programs of responses cannot reach into the sandbox. Linux, see prctl(2)."""

import ctypes

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522  # see capset(2)


def refuse_tracing() -> None:
    """Processes without CAP_SYS_PTRACE can no longer open /proc/PID/fd/* or /proc/PID/mem of this one, whoever's."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """From the next exec on this process has no capability, root's included, and no file gives it one.

    It keeps its user. A process without capabilities cannot trace one that has some.
    """
    capability = 0
    # Refused where there is nothing to drop, to an ordinary user, and behind the kernel's last capability.
    while _prctl(_PR_CAPBSET_DROP, capability) == 0:
        capability += 1
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    effective_permitted_inheritable = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(header, effective_permitted_inheritable)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, *(ctypes.c_ulong(one) for one in (value, 0, 0, 0))))
