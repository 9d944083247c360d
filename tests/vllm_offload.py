"""vLLM's offloading of pages without a GPU: its own scheduler, manager and views of the caches, and
copies that end at once in place of those by streams of CUDA."""

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copies(OffloadingWorker):
    """Copy pages, of each the bytes that vLLM would copy."""

    def __init__(self, caches: CanonicalKVCaches, places: int) -> None:
        self.caches = [cache.tensor for cache in caches.tensors]
        self.stored = [torch.zeros(places, cache.shape[1]).char() for cache in self.caches]
        self.groups = caches.group_data_refs
        self.done: list[int] = []

    def copy(self, job: int, pages: GPULoadStoreSpec, places: LoadStoreSpec, loads: bool) -> bool:
        """Copy some pages of each group of layers to their places, or back."""
        first = 0
        for views, count in zip(self.groups, pages.group_sizes):
            numbers = slice(first, first + count)
            rows = [torch.from_numpy(x.block_ids[numbers]).long() for x in (pages, places)]
            for view in views:
                size = view.page_size_bytes
                cache = (self.caches[view.tensor_idx][:, :size], rows[0])
                store = (self.stored[view.tensor_idx][:, :size], rows[1])
                (to, to_rows), (of, of_rows) = (cache, store) if loads else (store, cache)
                to[to_rows] = of[of_rows]
            first += count
        self.done.append(job)
        return True

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self.copy(job_id, src_spec, dst_spec, False)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        return self.copy(job_id, dst_spec, src_spec, True)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return [TransferResult(job_id=job, success=True) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        pass


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's offloading to the CPU, whose worker takes GPUs only."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        self._worker = self._worker or Copies(kv_caches, self.num_chunks)
        return self._worker
