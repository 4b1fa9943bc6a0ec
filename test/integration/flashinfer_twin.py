"""`BatchPrefillWithPagedKVCacheWrapper` in torch, by FlashInfer's documentation. Without a GPU it shows that the
library would receive the right rows, pages and lengths, and checks its arguments as strictly as it can."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def int32s(tensor: torch.Tensor) -> list[int]:
    assert tensor.dtype == torch.int32 and tensor.dim() == 1
    return tensor.tolist()


@dataclass
class TwinWrapper:
    """Twin of the wrapper. `error` is added to every page number except the first, so that a test can see a wrong one
    detected."""

    error: int = 0
    num_plans: int = 0
    num_runs: int = 0
    log: list[str] = field(default_factory=list)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        q_data_type,
        kv_data_type,
        max_token_per_sequence,
        seq_lens,
    ):
        rows, starts = int32s(qo_indptr), int32s(paged_kv_indptr)
        pages, last, keys = int32s(paged_kv_indices), int32s(paged_kv_last_page_len), int32s(seq_lens)
        assert rows[0] == starts[0] == 0 and len(rows) == len(starts) == len(last) + 1 == len(keys) + 1
        assert starts[-1] == len(pages) and causal
        self.sequences = []
        for i in range(len(keys)):
            own = pages[starts[i] : starts[i + 1]]
            assert rows[i] < rows[i + 1] and own and 1 <= last[i] <= page_size
            assert keys[i] == (len(own) - 1) * page_size + last[i], "the two ways of saying how long it is"
            own[1:] = [page + self.error for page in own[1:]]
            self.sequences.append((rows[i], rows[i + 1], own, keys[i]))
        assert max_token_per_sequence == max(end - first for first, end, _, _ in self.sequences)
        self.heads, self.dtypes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size), (q_data_type, kv_data_type)
        self.num_plans += 1
        self.log.append("plan")

    def run(self, q, paged_kv_cache, *, out, enable_pdl):
        """Attend over HND pages; the last row of a sequence sees all its keys, each row before it one less."""
        k_pages, v_pages = paged_kv_cache
        heads, kv_heads, dim, page_size = self.heads
        assert q.shape == out.shape == (self.sequences[-1][1], heads, dim)
        assert k_pages.shape[1:] == v_pages.shape[1:] == (kv_heads, page_size, dim)
        assert (q.dtype, k_pages.dtype) == self.dtypes and q.is_contiguous() and out.is_contiguous()
        for first, end, pages, num_keys in self.sequences:
            k, v = (
                x[pages].transpose(0, 1).flatten(1, 2)[:, :num_keys].float().repeat_interleave(heads // kv_heads, 0)
                for x in paged_kv_cache
            )
            scores = torch.einsum("thn,hsn->hts", q[first:end].float(), k) * dim**-0.5
            seen = torch.arange(num_keys) <= torch.arange(num_keys - (end - first), num_keys).unsqueeze(1)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hts,hsn->thn", weights, v).to(out.dtype)
        self.num_runs += 1
        self.log.append("run")
        return out
