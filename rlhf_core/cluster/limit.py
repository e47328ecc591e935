"""How long a call may take."""

from rlhf_core.config.pipeline import ClusterSettings


class Limit(float):
    """Seconds, with the name of the setting that they come from: who reads that a call took longer can raise it."""

    setting: str

    def __new__(cls, seconds: float, setting: str) -> "Limit":
        made = super().__new__(cls, seconds)
        made.setting = setting
        return made


def start_limit(cluster: ClusterSettings) -> Limit:
    """Of what starts, loads or saves."""
    return Limit(cluster.start_timeout_s, "run.cluster.start_timeout_s")
