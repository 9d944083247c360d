"""Let processes wait for another one without the time limit of collectives."""

from datetime import timedelta

import torch.distributed as dist


class Announcement:
    """Pass a text from one process to those that wait for it, by the process group's store.

    Every process makes its announcements of a topic in the same order: the n-th of one process
    and the n-th of another have one key. `rank` is this process.
    """

    def __init__(self, topic: str, rank: int) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        count = self.store.add(f"corecontext {topic} of {rank}", 1)
        self.key = f"corecontext {topic} {count}"

    def publish(self, text: str = "") -> None:
        """Give the text to the waiting processes."""
        self.store.set(self.key, text)

    def wait(self) -> str:
        """Wait for the text of the process that publishes it, and return it."""
        self.store.wait([self.key], timedelta(days=365))
        return self.store.get(self.key).decode()
