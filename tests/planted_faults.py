"""Plant a fault in a copy of the package and see that a test catches it: `python tests/planted_faults.py [word ...]`.

Prints one row of docs/numerics.md for each fault; words choose the faults whose name contains one of them. A fault that
no test notices, or whose text is no longer found, fails the run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LAWS, NUMERICS, API = "tests/test_ops_laws.py", "tests/test_ops_numerics.py", "tests/test_ops_api.py"
ORACLE, CACHE, PLUGIN = "tests/test_ops_oracle.py", "tests/test_cache.py", "tests/test_transformers.py"
INFERENCE, SINKS, SINK_MODELS = "tests/test_inference.py", "tests/test_sinks.py", "tests/test_sinks_models.py"


class Fault(NamedTuple):
    """What is broken, where, and the test that must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


FAULTS = [
    Fault("rule: one core token too late", "visibility.py", "(position + 1 - window_size) // group_size)",
          "(position - window_size) // group_size)", "tests/test_visibility.py"),
    Fault("1: full attention for one token too many", "ops/api.py", "is_full_attention(seq_len, size, window_size,",
          "is_full_attention(seq_len - 1, size, window_size,",
          f"{LAWS}::test_law_1_the_first_core_query_is_the_first_to_differ"),
    Fault("1: groups of one token are turned", "ops/pooling.py", "direction * (group_size // 2 -",
          "direction * ((group_size + 1) // 2 -", f"{LAWS}::test_law_1_groups_of_one_token_are_full_attention"),
    Fault("2: a token not covered, reference", "ops/reference.py", "(key_position >= cores * group_size)",
          "(key_position > cores * group_size)",
          f"{LAWS}::test_law_2_the_effective_map_is_causal_positive_and_sums_to_one"),
    Fault("2: a token covered twice, packed", "ops/packed.py", "window_size) * group_size) & (key <= position)",
          "window_size) * group_size - 1) & (key <= position)",
          f"{LAWS}::test_law_2_with_equal_scores_the_map_counts_every_token_once"),
    Fault("3: the next token is seen, reference", "ops/reference.py", "(key_position <= position)",
          "(key_position <= position + 1)", f"{LAWS}::test_law_3_nan_in_the_future_of_the_reference"),
    Fault("3: the next token is seen, packed", "ops/packed.py", "& (key <= position)", "& (key <= position + 1)",
          f"{LAWS}::test_law_3_the_past_is_bit_identical_under_any_finite_future"),
    Fault("3: a group is seen before it is complete", "ops/packed.py",
          "yield rows, slice(seen - 1, seen - 1 + -(-(q_end - pack_start) // g)), True",
          "yield rows, slice(seen, seen + -(-(q_end - pack_start) // g)), True",
          f"{LAWS}::test_laws_6_and_8_backends_agree_in_float64"),
    Fault("4: the ring is one token too short", "cache/layer.py",
          "return window_capacity(self.group_size, self.config.window_size) + self.rollback",
          "return window_capacity(self.group_size, self.config.window_size) + self.rollback - 1",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("4: decoding sees one core token too few", "cache/layer.py",
          "visible = visible_cores_of(position - n if n else position, g, s)[:, None]",
          "visible = visible_cores_of(position - n - 1 if n else position - 1, g, s)[:, None]",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("4: decoding never pools", "cache/layer.py", "if fixed or any(", "if fixed and any(",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("4: every row closes its group with the first row", "cache/layer.py",
          "closes = ((position + 1) % g == 0)", "closes = ((position[:1] + 1) % g == 0).expand(batch)",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("4: a rejected draft stays in the ring", "cache/layer.py",
          "write(cached, slots, lost[:, :, kept:kept + count])", "pass",
          f"{CACHE}::test_random_appends_and_crops_agree_with_the_reference"),
    Fault("4: beams keep the ring of another", "cache/layer.py",
          "self.hold([change(x) for x in self.buffers])",
          "self.hold([self.keys, *(change(x) for x in self.buffers[1:])])",
          f"{CACHE}::test_select_and_repeat_rows"),
    Fault("4: a ring that wraps goes on behind its beginning", "cache/slots.py",
          "cached[rows, :, :first + count - ring]]", "cached[rows, :, 1:1 + first + count - ring]]",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("4: plain attention for a prompt one token too long", "cache/layer.py",
          "num_visible_cores(end - 1, g, s) == 0", "num_visible_cores(end - 2, g, s) == 0",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("4: an expected length is used twice", "cache/layer.py",
          "start, new, self._expected = self.seq_len, q.shape[2], None", "start, new = self.seq_len, q.shape[2]",
          f"{CACHE}::test_an_expected_length_is_used_once"),
    Fault("5: a mask changed in place passes for the same", "ops/segments.py", "version != x._version",
          "version > x._version", f"{LAWS}::test_what_all_layers_ask_is_answered_once_and_anew_after_a_change"),
    Fault("4: a row of nothing but padding passes for known", "cache/layer.py",
          "all(pad < length for pad in self.pads if pad)", "True", f"{CACHE}::test_padding_is_never_guessed"),
    Fault("4: cached padding becomes tokens", "cache/layer.py", "min(known, start) != min(pad, start)",
          "known < start and known != pad", f"{CACHE}::test_padding_is_never_guessed"),
    Fault("plug-in: padding read one token at a time", "integrations/hf_cache.py",
          "if query_length == 1 and not self.compact.is_empty and self.compact.padding_known:",
          "if query_length == 1 and not self.compact.is_empty:",
          f"{PLUGIN}::test_one_token_chunks_inside_padding"),
    Fault("plug-in: the rotary frequencies 20 % off", "integrations/hf_rotary.py", "angle = torch.atan2(",
          "angle = 1.2 * torch.atan2(", f"{PLUGIN}::test_family_equals_dense_oracle"),
    Fault("plug-in: padding lost on its way", "integrations/transformers.py",
          "        return None\n    return attention_mask", "        return None\n    return None",
          f"{PLUGIN}::test_left_padded_batch_equals_single_rows"),
    Fault("plug-in: softcap lost on its way", "integrations/transformers.py",
          "kwargs.get(DRAFT, 0), attention_mask, scale=scaling,\n                          softcap=softcap)",
          "kwargs.get(DRAFT, 0), attention_mask, scale=scaling)",
          f"{PLUGIN}::test_family_equals_dense_oracle"),
    Fault("5: padding ignored", "ops/segments.py", "if bool(mask.all()):", "if True:",
          f"{LAWS}::test_law_5_a_padded_row_gives_what_it_gives_alone"),
    Fault("5: document boundaries ignored, cu_seqlens", "ops/segments.py",
          "return [Segment(0, 1, a, b) for a, b in zip(edges, edges[1:]) if a < b]",
          "return [Segment(0, 1, 0, seq_len)]",
          f"{LAWS}::test_law_5_packed_documents_do_not_see_each_other"),
    Fault("5: document boundaries ignored, position_ids", "ops/segments.py",
          "bool((position_ids.diff() != 1).any())", "bool((position_ids.diff() > 1).any())",
          f"{LAWS}::test_law_5_packed_documents_do_not_see_each_other"),
    Fault("6: gradient through the pooling weights dropped", "ops/pooling.py",
          "grad_scores = probs * (grad_probs -", "grad_scores = 0 * probs * (grad_probs -",
          f"{LAWS}::test_law_6_gradients_reach_through_the_pooling_weights"),
    Fault("6: core bias forgotten in the backward", "ops/packed.py", "lse = lse if self.core_bias is None else lse - ",
          "lse = lse if True else lse - ", f"{LAWS}::test_laws_6_and_8_backends_agree_in_float64"),
    Fault("6: keys turned to the middle, gradients not turned back", "ops/pooling.py",
          'part_k = _turn(torch.einsum("nrmg,nrmd->nmgd", weights, into_k), rotary, -1)',
          'part_k = torch.einsum("nrmg,nrmd->nmgd", weights, into_k)',
          f"{NUMERICS}::test_awkward_lengths"),
    Fault("6: gradient of the log-sum-exp dropped", "ops/partial.py", "delta = delta - grad_lse", "delta = delta",
          f"{NUMERICS}::test_float64_gradients_by_finite_differences"),
    Fault("7: softmax scale 0.2 % off in the core part", "ops/packed.py",
          "is_causal=packed, **self.options)",
          "is_causal=packed, **{**self.options, 'scale': self.options['scale'] * 1.002})",
          f"{NUMERICS}::test_awkward_lengths"),
    Fault("7: gradients of a group's g r queries added up in bfloat16", "ops/partial.py",
          "grad_k, grad_v = grad_k.sum(1, True, dtype=lse.dtype), grad_v.sum(1, True, dtype=lse.dtype)",
          "grad_k, grad_v = (sum(x.unbind(1)).unsqueeze(1) for x in (grad_k, grad_v))",
          f"{NUMERICS}::test_long_rows_in_half_precision_do_not_drift"),
    Fault("7: pooling computed in the inputs' dtype", "ops/pooling.py",
          "return x if x.dtype == torch.float64 else x.float()", "return x", f"{NUMERICS}::test_pooling_alone"),
    Fault("7: merge multiplies by exp(lse_i - lse)", "ops/merge.py", "weights = weights / total",
          "weights = (stacked - lse).exp()",
          f"{API}::test_merge_of_equal_outputs_is_that_output_however_large_the_scores"),
    Fault("8: weights of one query head instead of the mean", "ops/pooling.py", "probs.mean(1, keepdim=True)",
          "probs[:, :1]", f"{LAWS}::test_law_8_pooling_agrees"),
    Fault("oracle: default softmax scale", "ops/api.py", "scale = head_dim ** -0.5 if", "scale = head_dim ** -0.51 if",
          ORACLE),
    Fault("oracle: middle one token early", "ops/reference.py", "group_size // 2 - torch",
          "(group_size - 1) // 2 - torch",
          ORACLE),
    Fault("oracle: interleaved pairs turned the wrong way", "ops/rotary.py",
          "(first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)",
          "(first * cos + second * sin, second * cos - first * sin), -1).flatten(-2)", ORACLE),
    Fault("merge: no shift by the maximum", "ops/merge.py", "torch.where(highest.isneginf(), 0.0, highest)",
          "torch.zeros_like(highest)", f"{API}::test_merge_is_one_softmax_over_all_keys"),
    Fault("merge: NaN where no part has a key", "ops/merge.py", "torch.where(highest.isneginf(), 0.0, highest)",
          "highest", f"{API}::test_merge_is_one_softmax_over_all_keys"),
    Fault("memory: padding left uninitialised", "ops/autograd.py",
          "torch.full(self.like.shape, self.fill, dtype=self.dtype,", "torch.empty(self.like.shape, dtype=self.dtype,",
          f"{API}::test_nothing_reads_fresh_memory"),
    Fault("compile: wrong dtype of the log-sum-exp in the fake", "ops/autograd.py",
          "torch.empty(q.shape[:-1], dtype=_lse_dtype(q),", "torch.empty(q.shape[:-1], dtype=torch.float64,",
          f"{API}::test_registered_operators_describe_themselves_truly"),
    Fault("inference: positions count padding", "inference/prefill.py", "(positions - torch.tensor(pads,",
          "(positions - 0 * torch.tensor(pads,",
          f"{INFERENCE}::test_any_chunk_size_and_setting"),
    Fault("inference: a request leaves its settings behind", "inference/session.py",
          "self.handle.configure(**before.to_dict())", "pass",
          f"{INFERENCE}::test_two_streams_with_other_settings_at_once"),
    Fault("inference: neighbours share a random stream", "inference/sampling.py",
          "row.exponential_(generator=generator)", "row.exponential_(generator=self.generators[0])",
          f"{INFERENCE}::test_a_row_with_its_own_seed_does_not_depend_on_its_neighbours"),
    Fault("inference: top-p without the token that crosses it", "inference/sampling.py",
          "before = probabilities.cumsum(-1) - probabilities", "before = probabilities.cumsum(-1)",
          f"{INFERENCE}::test_sampled_frequencies_are_the_probabilities"),
    Fault("inference: broken sessions are kept", "inference/stream.py", "self._end(reusable=False)",
          "self._end(reusable=True)", f"{INFERENCE}::test_running_out_of_memory_names_what_would_fit"),
    Fault("inference: a smaller ring filled by old slots", "cache/layer.py", "write(smaller, kept % ring, read",
          "write(smaller, kept % old_ring % ring, read",
          f"{CACHE}::test_a_shrunk_window_is_exact_from_then_on"),
    Fault("sinks: a group too many stays raw", "visibility.py", "return -(-sink_size // group_size) * group_size",
          "return (sink_size // group_size + 1) * group_size", f"{SINKS}::test_the_integer_rules_are_the_definition"),
    Fault("sinks: full attention for one token too many", "visibility.py", "seq_len - sinks <= first_core_query(",
          "seq_len - sinks - 1 <= first_core_query(", f"{SINKS}::test_full_attention_up_to_its_exact_length"),
    Fault("sinks: counted twice, reference", "ops/reference.py", "+ sinks // group_size < cores", "< cores",
          f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask"),
    Fault("sinks: the future among them is seen", "ops/sinks.py", "hidden = position > position[q_start:, None]",
          "hidden = position > position[q_start:, None] + 1", f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("sinks: later queries do not see them", "ops/sinks.py",
          "_merge_into(out, lse, *partial.forward(after, first_k[:, None], first_v[:, None], **capped))", "pass",
          f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask"),
    Fault("sinks: their gradient from later queries dropped", "ops/sinks.py", "torch.cat((among[1] + first[1], dk), 1)",
          "torch.cat((among[1], dk), 1)", f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask"),
    Fault("sinks: the gradient of the log-sum-exp dropped", "ops/sinks.py", "grad_lse=some_grad_lse, is_causal",
          "grad_lse=None, is_causal", f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask"),
    Fault("sinks: weights of other groups' queries", "ops/segments.py", "self.q[:, :, first + g - 1:end:g]",
          "self.q[:, :, g - 1:end - first:g]", f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask"),
    Fault("sinks: the start of a chunk forgotten", "ops/sinks.py", "max(0, min(sinks - q_start, q.shape[2]))",
          "max(0, min(sinks, q.shape[2]))", f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("sinks: decoding puts them into the ring", "cache/layer.py",
          "target = torch.where((position >= 0) & (position < n), ring + position, target)", "pass",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("sinks: decoding sees those to come", "cache/layer.py", "torch.arange(n, device=q.device) <= position",
          "torch.arange(n, device=q.device) <= n + position",
          f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("sinks: decoding sees the ring's old slots", "cache/layer.py", "held >= visible * g + n, see_first",
          "held >= visible * g, see_first", f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("sinks: a core token in another's slot", "cache/layer.py", "core = (position - n if n else position) // g",
          "core = position // g", f"{CACHE}::test_any_way_of_appending_equals_one_pass"),
    Fault("sinks: core bias added to them", "cache/layer.py", "attend_buffer(q, keys, values, see, raw, scale",
          "attend_buffer(q, keys, values, see, ring, scale", f"{CACHE}::test_every_setting_decodes_as_it_prefills"),
    Fault("sinks: lost when the first append is differentiated", "cache/layer.py", "sink_size=c.sink_size, ", "",
          f"{CACHE}::test_first_append_is_differentiable_later_ones_refuse"),
    Fault("sinks: forgotten by a server's rows", "cache/pool.py",
          "+ n + num_complete_groups(max_length - n, g) * width", "+ num_complete_groups(max_length, g) * width",
          f"{CACHE}::test_bytes_equal_the_formula_from_the_first_token_on"),
    Fault("sinks: lost on their way into a model", "integrations/transformers.py",
          '"sink_size": config.sink_size, ', "", f"{SINK_MODELS}::test_the_model_sees_the_rule"),
    Fault("sinks: a shared beginning without them", "inference/prefix.py", "x[:, :, :part.raw_size].clone()",
          "x[:, :, :part.ring_size].clone()", "tests/test_scheduler.py::test_a_branched_cache_is_the_same_bits_under"
          "_every_setting"),
    Fault("5: of a document in a row the log-sum-exp of other tokens, Hopper", "ops/triton/hopper_backward.py",
          "lse = lse.contiguous()", "lse = lse",
          "tests/test_triton_dispatch.py::test_what_the_hopper_backward_prepares_is_of_its_own_rows"),
    Fault("arrows: a backend imports another", "ops/packed.py", "from corecontext.ops import compose, partial, pooling",
          "from corecontext.ops import compose, partial, pooling, reference", "tests/test_layers_arrows.py"),
]


def run_tests(nodes: list[str], fault: Fault | None = None) -> tuple[bool, str]:
    """Whether the tests pass on a copy of the package with the fault in it, and the first error they print."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("corecontext", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if fault is not None:
            path = copy / "corecontext" / fault.file
            text = path.read_text(encoding="utf-8")
            if fault.old not in text:
                raise ValueError(f"{fault.name}: {fault.file} no longer holds {fault.old!r}. Update the fault.")
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *nodes]
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    errors = [line[1:].strip() for line in done.stdout.splitlines() if re.match(r"E  +\S", line)]
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {nodes}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, errors[0] if errors else ""


def main(words: list[str]) -> int:
    """Run the chosen faults, two at a time; 0 when all are caught."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    passed, message = run_tests(sorted({fault.test for fault in chosen}))
    if not passed:
        print(f"the tests fail without any fault: {message}")
        return 1
    caught = True
    print("| law: planted fault | test | caught by |\n|---|---|---|")
    with ThreadPoolExecutor(2) as pool:
        for fault, (passed, message) in zip(chosen, pool.map(lambda fault: run_tests([fault.test], fault), chosen)):
            caught &= not passed
            shown = "**NOT CAUGHT**" if passed else f"`{message[:150].replace('|', '/').replace('`', '')}`"
            print(f"| {fault.name} | `{fault.test.removeprefix('tests/')}` | {shown} |", flush=True)
    return 0 if caught else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
