"""Plant a fault in a copy of the package and see that a test catches it: `python
tests/planted_faults.py [word ...]`.

A fault is a statement that replaces the one below the comment `# mutant <name of the fault>`,
wherever in the package that comment is. So moving or reformatting code leaves the faults as they
are; rewriting a marked statement means rewriting its fault.

Prints one row of docs/numerics.md for each fault; words choose the faults whose name contains one
of them. A fault that no test notices, or whose marker is missing, fails the run.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MARKED = ("corecontext", "benchmarks", "reproduction")
"""Folders whose statements are marked."""
LAWS, NUMERICS, API = (
    "tests/test_ops_laws.py",
    "tests/test_ops_numerics.py",
    "tests/test_ops_api.py",
)
EVAL_LAWS = "tests/test_eval_laws.py"
ORACLE, CACHE, PLUGIN = (
    "tests/test_ops_oracle.py",
    "tests/test_cache.py",
    "tests/test_transformers.py",
)
SCHEDULER, INFERENCE, SINKS, SINK_MODELS = (
    "tests/test_scheduler.py",
    "tests/test_inference.py",
    "tests/test_sinks.py",
    "tests/test_sinks_models.py",
)
FETCH = "tests/test_triton_fetch.py"
PREFILL, PREFILL_MODELS = ("tests/test_prefill.py", "tests/test_prefill_models.py")
STEP = "tests/test_triton_fetch_step.py"
PAGED_FETCH = "tests/test_triton_paged_fetch.py"
SECURITY = "tests/test_serve_security.py"
TRAIN_LAWS = "tests/test_train_laws.py"


class Fault(NamedTuple):
    """A faulty statement in place of the marked one, and the test that must fail."""

    name: str
    statement: str
    """Replaces the statement (of a compound statement: its header) below the marker."""
    test: str

    @property
    def marker(self) -> str:
        """The comment above the statement."""
        return f"# mutant {self.name}"


FAULTS = [
    Fault(
        "rule: one core token too late",
        "return max(0, (position - window_size) // group_size)",
        "tests/test_visibility.py",
    ),
    Fault(
        "1: full attention for one token too many",
        "if sized.is_full(length - 1):",
        f"{LAWS}::test_law_1_the_first_core_query_is_the_first_to_differ",
    ),
    Fault(
        "1: short rows forget the scale",
        "out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)",
        f"{LAWS}::test_every_part_has_the_scale_and_the_softcap",
    ),
    Fault(
        "1: groups of one token are turned",
        """
return rotary.rotate(
    k, direction * ((group_size + 1) // 2 - torch.arange(group_size, device=k.device))
)
""",
        f"{LAWS}::test_law_1_groups_of_one_token_are_full_attention",
    ),
    Fault(
        "2: a token not covered, reference",
        """
see_local = sees_token(key_position, position, *sizes, spec.sinks)
see_local = see_local & sees_token(key_position - 1, position, *sizes, spec.sinks)
""",
        f"{LAWS}::test_law_2_the_effective_map_is_causal_positive_and_sums_to_one",
    ),
    Fault(
        "2: a token covered twice, packed",
        """
seen = sees_token(key, position, group_size, window_size) | sees_token(
    key + 1, position, group_size, window_size
)
""",
        f"{LAWS}::test_law_2_with_equal_scores_the_map_counts_every_token_once",
    ),
    Fault(
        "3: the next token is seen, reference",
        """
see_local = sees_token(key_position, position, *sizes, spec.sinks)
see_local = see_local | (key_position == position + 1)
""",
        f"{LAWS}::test_law_3_nan_in_the_future_of_the_reference",
    ),
    Fault(
        "3: the next token is seen, packed",
        "seen = sees_token(key, position, group_size, window_size) | (key == position + 1)",
        f"{LAWS}::test_law_3_the_past_is_bit_identical_under_any_finite_future",
    ),
    Fault(
        "3: a group is seen before it is complete",
        "yield _CorePart(rows, slice(seen, seen + packs), True)",
        f"{LAWS}::test_laws_6_and_8_backends_agree_in_float64",
    ),
    Fault(
        "4: the ring is one token too short",
        "return window_capacity(self.group_size, self.spec.window_size) + self.rollback - 1",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "4: decoding sees one core token too few",
        "see_core = sees_core(torch.arange(num_cores, device=device), later - 1, *sizes)",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "4: decoding never pools",
        "closes = is_fixed and any((self.seen - pad) % g == g - 1 for pad in self.pads)",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "4: every row closes its group with the first row",
        "is_last = ((position[:1] + 1) % g == 0).expand(len(position))[:, None, None, None]",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "4: a rejected draft stays in the ring",
        "pass",
        f"{CACHE}::test_random_appends_and_crops_agree_with_the_reference",
    ),
    Fault(
        "4: beams keep the ring of another",
        "self.buffers = [self.keys, *(change(x) for x in self.buffers[1:])]",
        f"{CACHE}::test_select_and_repeat_rows",
    ),
    Fault(
        "4: a ring that wraps goes on behind its beginning",
        "return [buffer[rows, :, first:ring], buffer[rows, :, 1 : 1 + stop - ring]]",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "4: plain attention for a prompt one token too long",
        "is_plain = position == 0 and num_visible_cores(end - 2, g, entries.spec.window_size) == 0",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "4: a full cache of full attention goes on",
        "pass",
        f"{CACHE}::test_a_full_cache_of_full_attention_takes_no_more",
    ),
    Fault(
        "4: a cache loses its own state when it loads it",
        """
pads = pad.tolist()
self.reset()
self.pads = pads
""",
        f"{CACHE}::test_a_cache_may_load_its_own_state",
    ),
    Fault(
        "4: an expected length is used twice",
        "pass",
        f"{CACHE}::test_an_expected_length_is_used_once",
    ),
    Fault(
        "5: a mask changed in place passes for the same",
        """
return all(
    reference() is x and version <= x._version
    for (reference, version), x in zip(versions, tensors)
)
""",
        f"{LAWS}::test_what_all_layers_ask_is_answered_once_and_anew_after_a_change",
    ),
    Fault(
        "4: a row of nothing but padding passes for known",
        "self.padding_known = True",
        f"{CACHE}::test_padding_is_never_guessed",
    ),
    Fault(
        "4: cached padding becomes tokens",
        "if cached_pad < start and cached_pad != pad:",
        f"{CACHE}::test_padding_is_never_guessed",
    ),
    Fault(
        "plug-in: padding read one token at a time",
        "if query_length == 1 and not self.compact.is_empty:",
        f"{PLUGIN}::test_one_token_chunks_inside_padding",
    ),
    Fault(
        "plug-in: the rotary frequencies 20 % off",
        "angle = 1.2 * torch.atan2(sin[0, 1].double(), cos[0, 1].double())",
        f"{PLUGIN}::test_family_equals_dense_oracle",
    ),
    Fault(
        "plug-in: padding lost on its way",
        "return None",
        f"{PLUGIN}::test_left_padded_batch_equals_single_rows",
    ),
    Fault(
        "plug-in: a model that fails the self-check is enabled",
        "if False:",
        "tests/test_architectures.py"
        "::test_the_self_check_refuses_keys_that_do_not_rotate_as_the_model_says",
    ),
    Fault(
        "plug-in: a model that was never adapted is enabled in silence",
        "if False:",
        "tests/test_architectures.py::test_a_model_that_was_never_adapted_says_so_once",
    ),
    Fault(
        "plug-in: a layer that rotates no keys has its core keys rotated",
        "if False:",
        "tests/test_architectures.py::test_more_families_equal_the_dense_oracle",
    ),
    Fault(
        "loading: settings that do not fit the model are written",
        "pass",
        "tests/test_loading.py::test_settings_that_do_not_fit_the_model_are_written_nowhere",
    ),
    Fault(
        "mass: that of the group before, from a cache",
        "return self.buffers[-1][rows, :, start : start + count, 0].roll(1, 2)",
        "tests/test_cache_mass.py::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "heads: an interrupted search begins anew",
        "if True:",
        "tests/test_head_search.py::test_an_interrupted_search_goes_on_where_it_was",
    ),
    Fault(
        "heads: the cache of a search has no first tokens",
        "n = 0",
        "tests/test_head_search.py::test_the_cache_of_a_search_has_its_first_tokens",
    ),
    Fault(
        "plug-in: softcap lost on its way",
        "out = append(self.compact, tensors, attention_mask, draft, scaling, None)",
        f"{PLUGIN}::test_family_equals_dense_oracle",
    ),
    Fault(
        "5: a batch of padding has no backward",
        "nothing = 0",
        f"{LAWS}::test_a_batch_of_nothing_but_padding_has_gradients_of_zero",
    ),
    Fault(
        "5: padding ignored",
        "if True:",
        f"{LAWS}::test_law_5_a_padded_row_gives_what_it_gives_alone",
    ),
    Fault(
        "5: document boundaries ignored, cu_seqlens",
        "return [Segment(0, 1, 0, seq_len)]",
        f"{LAWS}::test_law_5_packed_documents_do_not_see_each_other",
    ),
    Fault(
        "5: document boundaries ignored, position_ids",
        "return bool((position_ids.diff() > 1).any())",
        f"{LAWS}::test_law_5_packed_documents_do_not_see_each_other",
    ),
    Fault(
        "6: gradient through the pooling weights dropped",
        "grad_scores = 0 * probs * (grad_weights - mean) * spec.scale",
        f"{LAWS}::test_law_6_gradients_reach_through_the_pooling_weights",
    ),
    Fault(
        "6: core bias forgotten in the backward",
        "lse = lse if True else lse - self.core_bias.to(lse.dtype)[:, :, None]",
        f"{LAWS}::test_laws_6_and_8_backends_agree_in_float64",
    ),
    Fault(
        "6: keys turned to the middle, gradients not turned back",
        "chunk_k = chunk_k",
        f"{NUMERICS}::test_awkward_lengths",
    ),
    Fault(
        "6: gradient of the log-sum-exp dropped",
        "delta = delta",
        f"{NUMERICS}::test_float64_gradients_by_finite_differences",
    ),
    Fault(
        "7: softmax scale 0.2 % off in the core part",
        """
out, lse = partial.forward(
    arranged,
    *core_kv,
    bias=self.bias_of_each(piece),
    is_causal=piece.packed,
    **{**self.options, "scale": self.options["scale"] * 1.002},
)
""",
        f"{NUMERICS}::test_awkward_lengths",
    ),
    Fault(
        "7: gradients of a group's g r queries added up in bfloat16",
        "grad_k, grad_v = (sum(x.unbind(1)).unsqueeze(1) for x in (grad_k, grad_v))",
        f"{NUMERICS}::test_long_rows_in_half_precision_do_not_drift",
    ),
    Fault(
        "7: pooling computed in the inputs' dtype", "return x", f"{NUMERICS}::test_pooling_alone"
    ),
    Fault(
        "7: merge multiplies by exp(lse_i - lse)",
        "weights = (stacked - lse).exp()",
        f"{API}::test_merge_of_equal_outputs_is_that_output_however_large_the_scores",
    ),
    Fault(
        "8: weights of one query head instead of the mean",
        "return probs[:, :1], probs, slope",
        f"{LAWS}::test_law_8_pooling_agrees",
    ),
    Fault(
        "oracle: default softmax scale",
        "return q.shape[3] ** -0.51",
        ORACLE,
    ),
    Fault(
        "oracle: middle one token early",
        "k = rotary.rotate(k, (group_size - 1) // 2 - torch.arange(group_size, device=k.device))",
        ORACLE,
    ),
    Fault(
        "oracle: interleaved pairs turned the wrong way",
        "pairs = torch.stack((first * cos + second * sin, second * cos - first * sin), -1)",
        ORACLE,
    ),
    Fault(
        "merge: no shift by the maximum",
        "highest = torch.zeros_like(highest)",
        f"{API}::test_merge_is_one_softmax_over_all_keys",
    ),
    Fault(
        "merge: NaN where no part has a key",
        "highest = highest",
        f"{API}::test_merge_is_one_softmax_over_all_keys",
    ),
    Fault(
        "memory: padding left uninitialised",
        "self.total = torch.empty(self.like.shape, dtype=self.dtype, device=self.like.device)",
        f"{API}::test_nothing_reads_fresh_memory",
    ),
    Fault(
        "compile: wrong dtype of the log-sum-exp in the fake",
        "lse = torch.empty(q.shape[:-1], dtype=torch.float64, device=q.device)",
        f"{API}::test_registered_operators_describe_themselves_truly",
    ),
    Fault(
        "inference: positions count padding",
        """
positions = (positions - 0 * torch.tensor(pads, device=input_ids.device)[:, None]).clamp(
    min=0
)
""",
        f"{INFERENCE}::test_any_chunk_size_and_setting",
    ),
    Fault(
        "inference: a request leaves its settings behind",
        "pass",
        f"{INFERENCE}::test_two_streams_with_other_settings_at_once",
    ),
    Fault(
        "training: an evaluation counts filler rows",
        "if True:",
        f"{TRAIN_LAWS}::test_every_evaluation_row_counts_once_on_any_number_of_processes",
    ),
    Fault(
        "training: a checkpoint is named before it is on the disk",
        "for path in []:",
        f"{TRAIN_LAWS}::test_a_checkpoint_is_on_the_disk_before_it_has_its_name",
    ),
    Fault(
        "inference: neighbours share a random stream",
        "row.exponential_(generator=generators[0])",
        f"{INFERENCE}::test_a_row_with_its_own_seed_does_not_depend_on_its_neighbours",
    ),
    Fault(
        "inference: top-p without the token that crosses it",
        "before = probabilities.cumsum(-1)",
        f"{INFERENCE}::test_sampled_frequencies_are_the_probabilities",
    ),
    Fault(
        "inference: top-p keeps a token beyond an exactly reached bound",
        "kept = (before <= top_p.clamp(min=1e-30)) & (ordered >= last)",
        f"{INFERENCE}::test_top_p_keeps_the_fewest_tokens_that_reach_it",
    ),
    Fault(
        "inference: a token is chosen from NaN",
        "return tokens",
        f"{INFERENCE}::test_logits_that_are_no_numbers_end_a_request",
    ),
    Fault(
        "inference: broken sessions are kept",
        "self._end(reusable=True)  # half a step may have been written",
        f"{INFERENCE}::test_running_out_of_memory_names_what_would_fit",
    ),
    Fault(
        "inference: a smaller ring filled by old slots",
        "write(smaller, kept % old_ring % ring, read(buffer, kept % old_ring))",
        f"{CACHE}::test_a_shrunk_window_is_exact_from_then_on",
    ),
    Fault(
        "config: an old checkpoint gets today's default",
        "return cls(**values)",
        "tests/test_config.py::test_settings_saved_before_a_field_existed_are_the_papers",
    ),
    Fault(
        "config: a checkpoint without settings gets the paper's rule",
        "return cls.from_dict(saved or {})",
        "tests/test_config.py::test_a_checkpoint_without_settings_gets_the_defaults",
    ),
    Fault(
        "config: a removed setting is ignored",
        "pass",
        "tests/test_config.py::test_a_field_that_is_no_more_is_refused_unless_it_was_off",
    ),
    Fault(
        "training: a run that fetches all groups is not idle",
        "most_groups = self.fetch_groups + 1",
        f"{TRAIN_LAWS}::test_a_run_whose_rows_never_leave_the_window_is_said_to_be_idle",
    ),
    Fault(
        "training: the settings of an old run get today's defaults",
        'values = values["config"]',
        "tests/test_train_parts.py::test_first_tokens_are_raw_but_under_the_papers_rule_and_in_old_runs",
    ),
    Fault(
        "context parallelism: gradients of first tokens from the last process only",
        "target += (wire.rank == wire.size - 1) * grad[..., slice(*layout.span(chunk)), :]",
        "tests/test_context_parallel.py::test_two_and_four_processes_equal_one",
    ),
    Fault(
        "context parallelism: with fetch, queries that pool get no gradient for it",
        "pass",
        "tests/test_context_parallel.py::test_two_and_four_processes_equal_one",
    ),
    Fault(
        "context parallelism: first tokens see the future among them",
        "future = torch.zeros(len(positions), k.shape[2], dtype=torch.bool, device=q.device)",
        "tests/test_context_parallel.py::test_two_and_four_processes_equal_one",
    ),
    Fault(
        "context parallelism: later chunks do not see the first tokens",
        "pass",
        "tests/test_context_parallel.py::test_two_and_four_processes_equal_one",
    ),
    Fault(
        "context parallelism: later chunks give a mass no gradient",
        "mass_grad = None",
        "tests/test_context_parallel.py::test_two_and_four_processes_equal_one",
    ),
    Fault(
        "sinks: a group too many stays raw",
        "return (sink_size // group_size + 1) * group_size",
        f"{SINKS}::test_the_integer_rules_are_the_definition",
    ),
    Fault(
        "sinks: full attention for one token too many",
        "return group_size == 1 or seq_len - sinks - 1 <= first_core_query(group_size, "
        "window_size)",
        f"{SINKS}::test_full_attention_up_to_its_exact_length",
    ),
    Fault(
        "sinks: counted twice, reference",
        "core = torch.arange(num_cores, device=position.device)",
        f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask",
    ),
    Fault(
        "sinks: the future among them is seen",
        'mask = {"bias": partial.mask_bias(position <= position[q_start:, None] + 1, q)}',
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "sinks: later queries do not see them",
        "pass",
        f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask",
    ),
    Fault(
        "sinks: their gradient from later queries dropped",
        "sink_dk = among_dk",
        f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask",
    ),
    Fault(
        "fetch: full attention where each query must choose",
        "may_be_full = spec.fetch_groups > 0",
        f"{FETCH}::test_full_attention_where_it_takes_less_time",
    ),
    Fault(
        "fetch: of equal scores the last groups are chosen",
        """
is_chosen = (bits >= high) | (
    is_last & (tl.sum(is_last.to(tl.int32), 0) - before < num_chosen - at_high)
)
""",
        f"{FETCH}::test_equal_scores_go_to_the_lower_number",
    ),
    Fault(
        "fetch: heads are compared without their products with the centre, Triton",
        "scores = dot(queries[i], k) * scale",
        f"{FETCH}::test_choice",
    ),
    Fault(
        "fetch: heads are compared without their products with the centre, PyTorch",
        "pass",
        "tests/test_fetch.py::test_each_index_chooses_as_in_the_reference",
    ),
    Fault(
        "fetch: a union shows groups before they are far past",
        "is_seen = group[None, :, :] < seen + 1",
        f"{FETCH}::test_unions",
    ),
    Fault(
        "fetch: a fetched group keeps its core token, Triton",
        "scores = tl.where(marked_entries(marks, start, FORM.block_n), scores, scores)",
        f"{FETCH}::test_attention",
    ),
    Fault(
        "fetch: a group of the window comes twice, Triton",
        "seen = (group >= 0)[None, :] & (visible >= 0)[:, None]",
        f"{FETCH}::test_attention",
    ),
    Fault(
        "fetch: raw tokens merged without their weight, Triton",
        "out = (acc / running_sum[:, None] + out) / 2",
        f"{FETCH}::test_attention",
    ),
    Fault(
        "fetch: the gradient of queries through core tokens is lost, Triton",
        "total = dq * scale",
        f"{FETCH}::test_gradients",
    ),
    Fault(
        "fetch: the gradient of keys in the window is lost, Triton",
        "dk = dk * scale",
        f"{FETCH}::test_gradients",
    ),
    Fault(
        "sinks: their gradient from later queries dropped, Triton",
        "gradient[:, :n] += 0 * far_gradient[:, :, :n].sum(1)",
        "tests/test_triton_attend.py::test_forward_and_gradients",
    ),
    Fault(
        "sinks: core bias added to them, Triton",
        "bias = F.pad(bias, (num_entries - num_cores, 0), value=0.5)",
        "tests/test_triton_attend.py::test_first_tokens_may_come_apart_from_the_others",
    ),
    Fault(
        "sinks: the gradient of the log-sum-exp dropped",
        "results = upstream.rows(rows)._replace(grad_lse=None)",
        f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask",
    ),
    Fault(
        "sinks: weights of other groups' queries",
        "q_last = q[:, :, g - 1 : end - first : g]",
        f"{SINKS}::test_rows_and_gradients_are_those_of_the_dense_mask",
    ),
    Fault(
        "sinks: the start of a chunk forgotten",
        "among = max(0, min(n, q.shape[2]))  # queries that are first tokens themselves",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "sinks: decoding puts them into the ring",
        "pass",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "sinks: decoding sees those to come",
        "see_first = sees_token(torch.arange(n, device=device), n + position, *sizes, n)",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "sinks: decoding sees the ring's old slots",
        "see_raw = sees_token(position - age, position, *sizes)",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "sinks: a core token in another's slot",
        "group = position // g",
        f"{CACHE}::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "sinks: core bias added to them",
        """
return attend_buffer(
    q,
    keys,
    values,
    see,
    entries.ring_size,
    scale=entries.spec.scale,
    softcap=entries.spec.softcap,
    core_bias=_core_bias(entries, q, num_cores),
)
""",
        f"{CACHE}::test_every_setting_decodes_as_it_prefills",
    ),
    Fault(
        "sinks: lost when the first append is differentiated",
        """
spec = spec.replace(sink_size=0)
return attend(inputs, spec, Ragged(attention_mask), self.config.backend)[0]
""",
        f"{CACHE}::test_first_append_is_differentiable_later_ones_refuse",
    ),
    Fault(
        "sinks: forgotten by a server's rows",
        "return ring + num_complete_groups(max_length, g)",
        f"{CACHE}::test_bytes_equal_the_formula_from_the_first_token_on",
    ),
    Fault(
        "sinks: lost on their way into a model",
        "spec = Spec.of(self.config.replace(sink_size=0), self.rotary, scale, softcap)",
        f"{SINK_MODELS}::test_the_model_sees_the_rule",
    ),
    Fault(
        "sinks: a shared beginning without them",
        "raw = [x[:, :, : self.ring_size].clone() for x in self.buffers]",
        f"{SCHEDULER}::test_a_branched_cache_is_the_same_bits_under_every_setting",
    ),
    Fault(
        "5: of a document in a row the log-sum-exp of other tokens, Hopper",
        "lse = upstream.lse  # of a document in a packed row it is a slice",
        "tests/test_triton_dispatch.py::test_what_the_hopper_backward_prepares_is_of_its_own_rows",
    ),
    Fault(
        "serve: sized by the settings of the prompt that is read",
        "type(self.admission)(self.max_length, self.memory, self.handle.config, self.full, "
        "self.policy).check(request)",
        f"{SCHEDULER}::test_a_request_is_sized_by_its_own_settings_while_another_is_read",
    ),
    Fault(
        "serve: a failing callback takes the others' tokens",
        "except ArithmeticError:",
        f"{SCHEDULER}::test_a_callback_that_fails_at_the_end_changes_no_other_answer",
    ),
    Fault(
        "serve: a client waits where the end of its text fails",
        "except ArithmeticError as error:",
        "tests/test_serve.py::test_an_answer_whose_last_text_fails_ends",
    ),
    Fault(
        "serve: a broken device leaves its clients waiting",
        "except ArithmeticError as error:",
        f"{SCHEDULER}::test_a_broken_device_ends_all_requests_and_the_thread",
    ),
    Fault(
        "serve: memory forgets the prompts that are read",
        "return self.shape.row_bytes(config, room)",
        f"{SCHEDULER}::test_caches_never_take_more_than_the_budget",
    ),
    Fault(
        "serve: the cache of a prompt grows beyond its row",
        "pass",
        f"{SCHEDULER}::test_caches_never_take_more_than_the_budget",
    ),
    Fault(
        "serve: a dropped beginning keeps its memory",
        "pass",
        f"{SCHEDULER}::test_a_dropped_beginning_frees_its_memory_while_a_prompt_behind_it_is_read",
    ),
    Fault(
        "serve: the hash of a chunk is that of its whole beginning",
        "return (config, parent, (parent and parent.key, *tokens))",
        f"{SCHEDULER}::test_a_prompt_of_many_chunks_is_shared_at_a_cost_by_chunk",
    ),
    Fault(
        "serve: a chunk that fails leaves its settings behind",
        "except AssertionError:\n    raise\nelse:",
        f"{SCHEDULER}::test_a_chunk_that_fails_leaves_the_models_settings_as_they_were",
    ),
    Fault(
        "serve: the ranks' store listens on every address",
        'listener.bind(("0.0.0.0", 0))',
        "tests/test_serve_parallel.py::test_every_process_listens_on_the_loopback_address_alone",
    ),
    Fault(
        "4: a full cache of fixed length goes on",
        "pass",
        f"{CACHE}::test_a_full_cache_of_fixed_length_refuses_steps",
    ),
    Fault(
        "4: padding unknown before a reset stays so",
        "pass",
        f"{CACHE}::test_a_cache_reset_within_padding_is_as_new",
    ),
    Fault(
        "4: a loaded ring passes for whole",
        "self._intact_from = 0",
        f"{CACHE}::test_a_loaded_cache_knows_from_where_its_ring_is_whole",
    ),
    Fault(
        "4: a loaded cache forgets that it is closed",
        "self._closed = None",
        f"{CACHE}::test_a_state_keeps_that_the_cache_is_closed",
    ),
    Fault(
        "4: crop accepts a window without its first token",
        "if num_tokens and min(needed) + 1 < intact_from:",
        f"{CACHE}::test_crop_is_refused_exactly_where_the_window_is_broken",
    ),
    Fault(
        "4: a chunk forgets the longest length",
        "self._intact_from = end - self.ring_size",
        f"{CACHE}::test_the_longest_length_counts_after_a_crop_a_chunk_and_a_step",
    ),
    Fault(
        "4: a draft from before a shrink is undone in the smaller ring",
        "pass",
        f"{CACHE}::test_a_draft_from_before_a_shrink_cannot_be_taken_back",
    ),
    Fault(
        "4: a captured step goes on with the tables of old frequencies",
        "if False:",
        f"{CACHE}::test_a_captured_step_finds_the_tables_of_changed_frequencies",
    ),
    Fault(
        "pooling: tables of frequencies that have changed",
        "version = 0",
        f"{CACHE}::test_a_captured_step_finds_the_tables_of_changed_frequencies",
    ),
    Fault(
        "serve: a longer request stays behind a shorter one",
        "pass",
        f"{CACHE}::test_a_longer_request_leaves_nothing_behind_in_its_row",
    ),
    Fault(
        "inference: steps captured before a shrink are replayed",
        "pass",
        f"{INFERENCE}::test_a_smaller_window_captures_its_steps_anew",
    ),
    Fault(
        "5: position_ids of another length are taken",
        "pass",
        f"{API}::test_messages_about_a_call",
    ),
    Fault(
        "7: core bias rounded to the inputs' dtype, packed",
        "lse = lse + self.core_bias.to(self.q.dtype)[:, :, None]",
        f"{NUMERICS}::test_a_core_bias_that_16_bits_do_not_hold",
    ),
    Fault(
        "decoding: fp8 rounds ties up",
        "normal = ((bits + 0x80000) & -0x100000).to(tl.float32, bitcast=True)",
        "tests/test_triton_decode.py::test_a_token_halfway_between_two_codes_gets_the_even_one",
    ),
    Fault(
        "decoding: a compiled step takes interleaved pairs for halves",
        "interleaved = False",
        "tests/test_triton_decode.py::test_compiles_as_one_graph",
    ),
    Fault(
        "mass: of the weights' last block alone, decoding",
        "mass = entropy(weights)",
        "tests/test_triton_decode.py::test_masses_are_computed_and_added",
    ),
    Fault(
        "mass: that of the entry before, in a fused step",
        "mass = tl.load(mass_ptr + entries - 1, mask=seen & is_core, other=0.0)",
        "tests/test_triton_decode.py::test_masses_are_computed_and_added",
    ),
    Fault(
        "fetch: chosen groups keep their core tokens in a step's sums",
        "weights = tl.where(number == removed, 0.0, weights)",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "fetch: a step's index scores without their scales",
        "factor = ((scales > 0).to(tl.float32) * scale)[:, None]",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "fetch: a step compares heads without their products with the centre",
        "offset = tl.sum(q.to(tl.float32) * centre, 0) * 0.0",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "fetch: the second levels of bytes, mirrored, in a step",
        "l1 = (-(table >> ((shift >> 2) & 24))).to(tl.int8)",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "fetch: of equal scores a step chooses the last groups",
        "is_chosen = (inside & (values >= high)) | (is_last & (before > at_low - num_chosen))",
        f"{STEP}::test_of_equal_groups_the_lower_are_fetched",
    ),
    Fault(
        "fetch: a step evicts a group that it reads",
        "return tl.where(exists, age, NEVER)",
        "tests/test_triton_fetch_slots.py::test_slots_are_those_of_the_store",
    ),
    Fault(
        "fetch: an evicted group keeps its slot, in a step",
        "pass",
        "tests/test_triton_fetch_slots.py::test_slots_are_those_of_the_store",
    ),
    Fault(
        "fetch: a missing group is loaded as if there were no first tokens",
        "source = n * room * HEAD_DIM + group.to(tl.int64) * GROUP",
        "tests/test_triton_fetch_slots.py::test_slots_are_those_of_the_store",
    ),
    Fault(
        "fetch: a fused step leaves its raw token unstored",
        "pass",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "fetch: a fused step reads groups as if there were no first tokens",
        "token = tl.where(seen, group, 0).to(tl.int64) * group_size + place % group_size",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "fetch: a step writes no centre",
        "pass",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "fetch: a fused step leaves the index of a closed group unwritten",
        "pass",
        f"{STEP}::test_every_step_of_every_row",
    ),
    Fault(
        "offsets: 32 bits in a decoding step",
        "n = row",
        "tests/test_triton_far.py::test_decoding",
    ),
    Fault(
        "offsets: 32 bits of a sequence in pooling",
        "n = tl.program_id(0) // tiles",
        "tests/test_triton_far.py::test_pooling",
    ),
    Fault(
        "offsets: 32 bits of a head in pooling",
        "return ptr + head * stride",
        "tests/test_triton_far.py::test_pooling",
    ),
    Fault(
        "3: the next token is seen, Triton tiles without a mask",
        "causal = tl.maximum(middle, middle + (behind + 1) // FORM.block_n * FORM.block_n)",
        "tests/test_triton_attend.py::test_tiles_without_a_mask_hold_no_token_of_the_future",
    ),
    Fault(
        "offsets: 32 bits of a head in the forward",
        "head = pid % heads[0]",
        "tests/test_triton_far.py::test_attention",
    ),
    Fault(
        "fetch: a group not seen yet is fetched, reference",
        "return choice",
        "tests/test_fetch.py::test_results_and_gradients_are_the_references",
    ),
    Fault(
        "fetch: a core token stays beside its raw tokens, reference",
        "return see_core[None, None], (see_raw | raw)[:, None]",
        "tests/test_fetch.py::test_all_groups_fetched_are_full_attention",
    ),
    Fault(
        "fetch: the first query head chooses for all",
        "largest = scores.masked_fill(~visible, -torch.inf)[:, 0]",
        "tests/test_fetch.py::test_each_index_chooses_as_in_the_reference",
    ),
    Fault(
        "fetch: a choice has room for groups that do not exist",
        "k = spec.fetch_groups",
        "tests/test_fetch.py::test_memory_follows_the_sequence_not_the_settings",
    ),
    Fault(
        "fetch: a shared choice starts with the call, not at a multiple",
        "head = 0",
        "tests/test_fetch.py::test_shares_are_aligned_to_positions_of_the_sequence",
    ),
    Fault(
        "fetch: of equal groups all are taken",
        "chosen = above | equal",
        "tests/test_fetch.py::test_the_best_are_those_of_a_stable_sort",
    ),
    Fault(
        "fetch: scale of the least squared error",
        "correction = (x * stored).sum(dims) / stored.square().sum(dims)",
        "tests/test_fetch.py::test_stored_keys_keep_their_own_product",
    ),
    Fault(
        "fetch: gradient of the log-sum-exp dropped, core tokens",
        "pass",
        "tests/test_fetch.py::test_results_and_gradients_are_the_references",
    ),
    Fault(
        "fetch: the backward has another choice",
        "of_segments = zip(segments, [*choices][::-1] or [None] * len(segments), strict=True)",
        "tests/test_fetch.py::test_documents_of_different_length_have_gradients_of_their_own_choice",
    ),
    Fault(
        "fetch: the first group is seen where there is none",
        "seen = (self.choice[:, rows] >= -1).flatten(0, 1)",
        "tests/test_fetch.py::test_gathered_groups_and_small_blocks_change_nothing",
    ),
    Fault(
        "fetch: gradient of the core keys dropped",
        "pass",
        "tests/test_fetch.py::test_results_and_gradients_are_the_references",
    ),
    Fault(
        "fetch: a shared choice shows groups before they are far past",
        "return groups",
        "tests/test_fetch.py::test_results_and_gradients_are_the_references",
    ),
    Fault(
        "fetch: first tokens are not seen",
        "mask = sees_token(keys, position, g, window)",
        "tests/test_fetch.py::test_all_groups_fetched_are_full_attention",
    ),
    Fault(
        "fetch: a cache's index of a later group",
        "view = buffer[rows, :, : x.shape[1]]",
        "tests/test_cache_fetch.py::test_any_index_is_kept_as_it_is_built",
    ),
    Fault(
        "fetch: a step leaves the index of a closed group unwritten",
        "pass",
        "tests/test_cache_fetch.py::test_any_index_is_kept_as_it_is_built",
    ),
    Fault(
        "fetch: decoding sees a core token beside its raw tokens",
        "hidden = torch.zeros_like(marks)[:, None, None]",
        "tests/test_cache_fetch.py::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "fetch: a chunk reads its own tokens in place of those before it",
        "before = x[rows, :, newest.position : newest.position + position - start]",
        "tests/test_cache_fetch.py::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "fetch: a chunk's raw tokens are not stored",
        "pass",
        "tests/test_cache_fetch.py::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "prefill: a prompt is read by CCA",
        "if entries.store is None or entries.config.keeps_raw_prompts:",
        f"{PREFILL}::test_a_prompt_and_what_follows_are_those_of_the_definition",
    ),
    Fault(
        "prefill: raw tokens of a prompt stay",
        "self.store = self.store",
        f"{PREFILL}::test_raw_tokens_leave_with_the_prompt",
    ),
    Fault(
        "prefill: a last chunk of one token is a step",
        "is_step = q.shape[2] == 1 and attention_mask is None",
        f"{PREFILL}::test_a_prompt_and_what_follows_are_those_of_the_definition",
    ),
    Fault(
        "prefill: a prompt is read after its tokens are rounded",
        """
raw = entries.decode(stored, k.dtype)
return NewTokens(q, *raw, stored, raw)
""",
        f"{PREFILL}::test_a_prompt_is_read_before_its_tokens_are_rounded",
    ),
    Fault(
        "prefill: core tokens of a prompt are pooled before they are rounded",
        "k, v = (x[:, :, new_sinks:] for x in new.raw)",
        f"{PREFILL}::test_a_prompt_is_read_before_its_tokens_are_rounded",
    ),
    Fault(
        "prefill: a draft is read as a prompt",
        "options_of_draft = options",
        f"{PREFILL_MODELS}::test_generate_is_the_definition",
    ),
    Fault(
        "prefill: memory forgets the raw tokens of prompts",
        'if config is not None and config.prefill == "none":',
        f"{PREFILL_MODELS}::test_a_server_reads_alike_shares_no_beginnings_and_counts_raw_tokens",
    ),
    Fault(
        "plug-in: a loss is that of a prompt",
        "pass",
        f"{PREFILL_MODELS}::test_texts_are_not_scored_as_prompts",
    ),
    Fault(
        "fetch: a prompt's neighbours choose each by itself",
        "return spec.replace(fetch_groups=self.times * spec.fetch_groups)",
        f"{PREFILL}::test_a_prompt_is_read_in_full_then_by_shared_choices",
    ),
    Fault(
        "prefill: a prompt goes on from a beginning without raw tokens",
        "return slot.config is not None",
        f"{PREFILL_MODELS}::test_a_server_reads_alike_shares_no_beginnings_and_counts_raw_tokens",
    ),
    Fault(
        "fetch: groups that steps closed are not pooled",
        "pass",
        f"{PREFILL}::test_steps_read_all_raw_tokens_while_that_takes_less_time",
    ),
    Fault(
        "fetch: a ring that lags is read",
        "pass",
        f"{PREFILL}::test_steps_read_all_raw_tokens_while_that_takes_less_time",
    ),
    Fault(
        "prefill: the perplexity of full attention",
        "return {}",
        f"{PREFILL_MODELS}::test_texts_are_not_scored_as_prompts",
    ),
    Fault(
        "fetch: beams keep the raw tokens of another",
        "pass",
        "tests/test_cache_fetch.py::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "fetch: an index without its centre",
        "pass",
        "tests/test_cache_fetch.py::test_any_index_is_kept_as_it_is_built",
    ),
    Fault(
        "fetch: an evicted group keeps its slot",
        "pass",
        "tests/test_cache_fetch.py::test_any_way_of_appending_equals_one_pass",
    ),
    Fault(
        "fetch: a group cropped away keeps its slot",
        "pass",
        "tests/test_cache_host.py::test_a_second_text_after_a_crop",
    ),
    Fault(
        "fetch: rows are reordered without their table",
        "pass",
        "tests/test_cache_host.py::test_beams_take_their_tokens_along",
    ),
    Fault(
        "fetch: beams keep the host's raw tokens of another",
        "pass",
        "tests/test_cache_host.py::test_beams_take_their_tokens_along",
    ),
    Fault(
        "fetch: tokens of a text before stay in the first group",
        "pass",
        "tests/test_cache_host.py::test_tokens_of_a_text_before_reach_no_result",
    ),
    Fault(
        "fetch: a row moves without its slots",
        "pass",
        "tests/test_cache_host.py::test_rows_of_a_pool_come_and_go",
    ),
    Fault(
        "serve: raw tokens in host memory are not counted",
        "return device",
        "tests/test_fetch_models.py::test_a_server_refuses_what_its_memories_do_not_hold",
    ),
    Fault(
        "serve: raw tokens on the device are not counted",
        "device += heads * compact",
        "tests/test_fetch_models.py::test_a_server_refuses_what_its_memories_do_not_hold",
    ),
    Fault(
        "serve: a request's raw tokens stay with its prompt",
        "pass",
        "tests/test_fetch_models.py::test_a_server_equals_recomputing",
    ),
    Fault(
        "serve: a shared beginning without its raw tokens",
        "self.fetched = [x.store.copy_since(0, self.length) for x in caches if x.store]",
        "tests/test_fetch_models.py::test_a_server_equals_recomputing",
    ),
    Fault(
        "inference: idle caches keep their host memory",
        "pass",
        "tests/test_fetch_models.py::test_the_engine_refuses_what_host_memory_does_not_hold",
    ),
    Fault(
        "fetch: keys are centred by tokens to come",
        "return min(MOST_CENTRED, 2 * window_size) // group_size * group_size",
        "tests/test_fetch.py::test_low_bits_are_centred_by_tokens_that_every_query_sees",
    ),
    Fault(
        "fetch: an index centred for the window of before",
        "spec = self.spec",
        "tests/test_cache_fetch.py::test_any_index_is_kept_as_it_is_built",
    ),
    Fault(
        "fetch: as many warps as there are runs of groups",
        "return max(4, min(_SELECT_WARPS, num_groups // 512))",
        "tests/test_triton_fetch_step.py::test_warps_are_a_power_of_2_for_any_length",
    ),
    Fault(
        "mass: a bias of each query head is taken for masses",
        "is_mass = core_bias.dim() == 3",
        "tests/test_triton_dispatch.py::test_masses_alone_are_told_from_other_biases",
    ),
    Fault(
        "mass: entropy in bits",
        "return torch.special.entr(weights).sum(-1) / 0.6931",
        "tests/test_mass.py::test_results_and_gradients_are_the_references",
    ),
    Fault(
        "mass: gradient without the softmax's mean",
        "grad_scores = probs * grad_weights * spec.scale",
        "tests/test_mass.py::test_gradients_are_those_of_autograd_through_the_reference",
    ),
    Fault(
        "mass: not that of the entry, decoding",
        "bias = F.pad(core_bias.flip(-1), (num_raw, 0))",
        "tests/test_mass.py::test_a_buffer_of_entries_with_their_masses",
    ),
    Fault(
        "mass: its gradient reaches no query",
        "return grad_bias.sum(-1), None",
        "tests/test_mass.py::test_results_and_gradients_are_the_references",
    ),
    Fault(
        "offsets: 32 bits of a group in pooling",
        "first = tl.program_id(0) % tiles * BLOCK_M",
        "tests/test_triton_far.py::test_pooling",
    ),
    Fault(
        "decoding: core bias rounded to 16 bits",
        "bias = (is_core * core_bias).to(q.dtype).to(wide)",
        f"{CACHE}::test_decoding_does_not_round_the_core_bias",
    ),
    Fault(
        "eval: names of data are read as markup",
        "return Console(highlight=False, width=width)",
        "tests/test_eval.py::test_names_of_data_are_printed_as_they_are",
    ),
    Fault(
        "demo: an answer has a token too many",
        "while len(answer) <= question.max_new_tokens and not _ends(tokenizer, answer[-1]):",
        "tests/test_demo_parts.py"
        "::test_an_answer_ends_with_its_line_its_message_or_the_most_tokens",
    ),
    Fault(
        "perplexity: buckets shifted by one token",
        "nll = self.nll[start:end]",
        f"{EVAL_LAWS}::test_a_token_belongs_to_the_bucket_of_its_position",
    ),
    Fault(
        "perplexity: losses that are no numbers pass",
        "if False:",
        "tests/test_eval.py::test_losses_that_are_no_numbers_are_an_error",
    ),
    Fault(
        "eval: every window counts the same",
        'entries = [("", math.log(record.value), 1)]',
        f"{EVAL_LAWS}::test_perplexity_of_several_windows_is_that_of_all_their_tokens",
    ),
    Fault(
        "eval: characters counted for bytes",
        "return len(text)",
        f"{EVAL_LAWS}::test_bytes_are_those_of_utf8",
    ),
    Fault(
        "eval: F1 of words without their counts",
        "common = len(set(given) & set(wanted))",
        "tests/test_suites.py::test_f1_counts_a_word_as_often_as_it_comes",
    ),
    Fault(
        "eval: edit similarity not in whole hundredths",
        "return difflib.SequenceMatcher(None, code, reference).ratio()",
        "tests/test_suites.py::test_edit_similarity_is_in_whole_hundredths",
    ),
    Fault(
        "eval: references match in their own case only",
        "return float(any(reference in text for reference in references))",
        "tests/test_suites.py::test_matches_ignore_the_case_of_answer_and_reference",
    ),
    Fault(
        "inspect: a token can end the script",
        "text = str(text)",
        f"{EVAL_LAWS}::test_no_text_ends_the_script_of_an_inspected_page",
    ),
    Fault(
        "serve: an error for each invalid message",
        "messages: list[Message] = Field(min_length=1)",
        "tests/test_serve.py::test_a_large_invalid_body_makes_few_errors_and_is_answered_soon",
    ),
    Fault(
        "serve: a key that only begins right",
        "matches = hmac.compare_digest(key.strip()[: len(self._key)], self._key)",
        f"{SECURITY}::test_a_key_that_is_only_like_the_right_one_is_refused",
    ),
    Fault(
        "serve: the time of a comparison tells how far a key is right",
        "matches = key.strip() == self._key",
        f"{SECURITY}::test_keys_are_compared_in_constant_time",
    ),
    Fault(
        "serve: the right key under any scheme",
        "if not matches:",
        f"{SECURITY}::test_the_right_key_is_taken_under_its_scheme_alone",
    ),
    Fault(
        "serve: the key of the environment is ignored",
        "if path is None:\n    return None\nif False:",
        f"{SECURITY}::test_the_command_takes_the_key_of_the_environment_or_of_a_file",
    ),
    Fault(
        "serve: the line break of the key's file is a part of the key",
        "return read_text(path)",
        f"{SECURITY}::test_the_command_takes_the_key_of_the_environment_or_of_a_file",
    ),
    Fault(
        "serve: listens on every address",
        'host: str = "0.0.0.0"',
        f"{SECURITY}::test_the_default_address_is_the_loopback",
    ),
    Fault(
        "serve: open to the network without a word",
        "if False:",
        f"{SECURITY}::test_an_open_address_without_a_key_is_a_warning",
    ),
    Fault(
        "serve: a line break forges a log line",
        'return json.dumps(line, ensure_ascii=False).replace("\\\\n", "\\n")',
        f"{SECURITY}::test_a_log_record_is_one_line_whatever_it_holds",
    ),
    Fault(
        "serve: the beginning of a stop text is sent",
        "begin = len(text)",
        f"{SECURITY}::test_the_beginning_of_a_stop_text_waits_for_its_end",
    ),
    Fault(
        "loading: weights that the checkpoint lacks are random numbers",
        "if False:",
        "tests/test_loading.py::test_weights_are_those_that_the_config_describes",
    ),
    Fault(
        "loading: weights that are no numbers pass",
        "broken = []",
        "tests/test_loading.py::test_weights_are_finite",
    ),
    Fault(
        "gguf: a damaged folder is used",
        "return folder.is_dir()",
        "tests/test_gguf.py::test_a_damaged_folder_is_made_again",
    ),
    Fault(
        "serve: log-probabilities of the tokens before",
        "tokens = slot.request.prompt[start : start + len(logits)]",
        "tests/test_serve_logprobs.py",
    ),
    Fault(
        "serve: a prompt that is scored begins with the cache of another",
        "if True:",
        "tests/test_serve_logprobs.py",
    ),
    Fault(
        "serve: connections without limit",
        "if False:",
        f"{SECURITY}::test_connections_beyond_the_limit_are_closed",
    ),
    Fault(
        "serve: headers without deadline",
        "if phase is h11.SEND_BODY:",
        f"{SECURITY}::test_a_request_that_does_not_arrive_is_closed_in_time",
    ),
    Fault(
        "serve: a body without deadline",
        "message = await receive()",
        f"{SECURITY}::test_a_body_that_does_not_end_is_refused_in_time",
    ),
    Fault(
        "serve: two lengths of one body",
        "if False:",
        f"{SECURITY}::test_a_body_has_one_length",
    ),
    Fault(
        "serve: any host name reaches a server without a key",
        "if False:",
        f"{SECURITY}::test_a_browser_reaches_a_server_without_a_key_by_no_name_of_its_own",
    ),
    Fault(
        "serve: the interpreter ends under the model's thread",
        "if False:",
        f"{SECURITY}::test_a_thread_that_is_still_in_the_model_ends_with_the_process",
    ),
    Fault(
        "serve: the text of an error in the log",
        "event = record.getMessage()",
        f"{SECURITY}::test_lines_of_asyncio_hold_no_text_of_an_error",
    ),
    Fault(
        "serve: a request gets the model's k, not its own",
        "_with_fetch_groups(config, fetch_groups)",
        "tests/test_inference_parts.py::"
        "test_the_number_of_groups_fetched_is_the_requests_else_the_policys",
    ),
    Fault(
        "serve: g and s are lowered before k",
        "steps = ((0.5, 1, 1), (0.65, 2, 1), (0.8, 4, 2), (0.9, 4, 4), (1.0, 4, 16))",
        "tests/test_inference_parts.py::"
        "test_a_table_lowers_the_groups_fetched_before_it_touches_g_and_s",
    ),
    Fault(
        "serve: clients make metrics without limit",
        "if False:",
        f"{SECURITY}::test_clients_do_not_make_metrics_without_limit",
    ),
    Fault(
        "serve: a stop text in the last characters does not count",
        "if rest and self.text.stopped:",
        f"{SECURITY}::test_a_stop_text_in_the_last_characters_is_the_reason_of_the_end",
    ),
    Fault(
        "serve: the text of a request's error in the log",
        'return {"error": repr(slot.error), "at": "".join(places[-1:])}',
        f"{SECURITY}::test_the_log_of_a_request_that_fails_holds_no_text_of_its_error",
    ),
    Fault(
        "serve: the key on the command line of the other ranks",
        "without_key = serving",
        f"{SECURITY}::test_the_other_ranks_do_not_get_the_key_on_their_command_line",
    ),
    Fault(
        "serve: a neighbour's number of likely tokens",
        "slots[row].logprobs.append(record._replace(top=record.top or []))",
        "tests/test_serve_logprobs.py::test_neighbours_get_as_many_likely_tokens_as_each_asked_for",
    ),
    Fault(
        "serve: cached tokens of the first prompt alone",
        """
return {
    "prompt_tokens": prompt_tokens,
    "completion_tokens": made,
    "total_tokens": prompt_tokens + made,
    "prompt_tokens_details": {"cached_tokens": slots[0].cached_tokens},
}
""",
        "tests/test_serve_logprobs.py::test_cached_tokens_are_those_of_all_prompts",
    ),
    Fault(
        "serve: each byte of the headers moves their deadline",
        "if phase is not None:",
        f"{SECURITY}::test_a_request_that_drips_in_has_one_deadline",
    ),
    Fault(
        "serve: invalid requests are not counted",
        'if is_api and message["type"] == "http.response.start" and message["status"] > 400:',
        f"{SECURITY}::test_answers_that_are_errors_are_counted_from_400_on",
    ),
    Fault(
        "serve: the load forgets the caches into which prompts are read",
        "return sum((len(pool.slots) + pool.promised) * pool.row_bytes for pool in self.pools)",
        f"{SCHEDULER}::test_the_load_counts_the_cache_into_which_a_prompt_is_read",
    ),
    Fault(
        "4: each chunk of a prompt makes room for itself",
        "self.reserve(length - min(self.pads))",
        "tests/test_cache_host.py::test_a_planned_prompt_makes_room_once",
    ),
    Fault(
        "4: a cache that was closed stays so after a reset",
        "self._closed = self._closed",
        f"{CACHE}::test_a_cache_that_was_closed_takes_tokens_again_after_a_reset",
    ),
    Fault(
        "plug-in: the self-check ends a model's training mode",
        "model.eval()",
        "tests/test_architectures.py::test_the_self_check_leaves_a_model_in_its_mode",
    ),
    Fault(
        "gguf: a file that was replaced by one of its size is not seen",
        'identity = f"{path.resolve()} {status.st_size}"',
        "tests/test_gguf.py::test_a_file_that_was_replaced_by_one_of_its_size_is_unpacked_anew",
    ),
    Fault(
        "heads: a search goes on with the losses of other weights",
        "for tensor in rows:",
        "tests/test_head_search.py::test_a_search_is_of_its_model_rows_and_settings",
    ),
    Fault(
        "inference: a top-k beyond the vocabulary in a step of several requests",
        """
limits = (
    column([s.top_k or vocabulary for s in sampled], torch.long),
    column([s.top_p for s in sampled], torch.float32),
)
""",
        f"{INFERENCE}::test_a_top_k_beyond_the_vocabulary_is_every_token",
    ),
    Fault(
        "training: the loss of a batch without labels is no number",
        "count = torch.as_tensor(count, dtype=torch.float32, device=hidden.device)",
        "tests/test_train_parts.py::test_the_loss_of_a_batch_without_labels_is_0",
    ),
    Fault(
        "training: sizes by head stay lists",
        "fields[name] = tuple(value)",
        "tests/test_train_settings.py",
    ),
    Fault(
        "training: a document of just the bound is long",
        "is_long = lengths[documents] >= long_tokens",
        "tests/test_corpus.py::test_long_documents_have_more_tokens_than_the_bound",
    ),
    Fault(
        "eval: a prompt of MMLU without room for its letter",
        "if subject.limit is None or len(subject.encode_prompt(prompt)) <= subject.limit:",
        "tests/test_suites.py::test_an_mmlu_prompt_and_its_letter_fit_the_limit",
    ),
    Fault(
        "baselines: the chunk before a query's is read forwards",
        "x = x.clone()",
        "tests/test_baselines.py::test_a_window_alone_equals_its_mask",
    ),
    Fault(
        "baselines: a diagonal too few",
        "count = min(pattern.second // block_size, slash.shape[2])",
        "tests/test_attentions.py::test_the_picked_diagonals_hold_as_many_tokens_as_the_pattern_says",
    ),
    Fault(
        "loading: a byte order mark is a part of the text",
        'text = data.decode("utf-8")',
        "tests/test_data_parts.py::test_documents_of_an_evaluation_have_a_name_and_a_domain",
    ),
    Fault(
        "vllm: a window page is dropped too early",
        "return local_start(computed + self.group_size, self.group_size, self.window_size)",
        "tests/test_vllm_pages.py::test_any_schedule_reads_what_the_rule_allows",
    ),
    Fault(
        "vllm: a group is pooled before its last token",
        "completed = begin + GROUP <= length + 1",
        "tests/test_triton_paged.py::test_padding_of_a_captured_batch_changes_nothing",
    ),
    Fault(
        "vllm: a token is seen beside its core token",
        "sees_raw = (token[None, :] >= low[:, None] * 0) | (token < first_group * GROUP)[None, :]",
        "tests/test_triton_paged.py::test_a_ragged_batch_of_chunks_and_decoding_tokens",
    ),
    Fault(
        "vllm: tokens of a prompt choose",
        "pads = tl.where(exists, -position, 1)",
        f"{PAGED_FETCH}::test_tokens_of_prompts_see_all_tokens",
    ),
    Fault(
        "vllm: neighbours of a prompt choose each by itself",
        "spec = reading._replace(share=1).settings(spec)",
        f"{PAGED_FETCH}::test_neighbours_of_a_prompt_share_a_choice",
    ),
    Fault(
        "vllm: an index is written a group too late",
        "if (completed * GROUP + 2 * GROUP <= length) & (group >= FIRST):",
        f"{PAGED_FETCH}::test_an_index_is_written_as_the_reference_encodes_it",
    ),
    Fault(
        "vllm: chosen groups keep their core tokens",
        "is_chosen = tl.load(marks_ptr + group, mask=is_core, other=0) > 1",
        f"{PAGED_FETCH}::test_shares_of_the_entries_are_merged",
    ),
    Fault(
        "vllm: an older release gets the plug-in",
        "OLDEST = (0, 28)",
        "tests/test_vllm_pages.py::test_an_older_release_of_vllm_gets_no_plug_in",
    ),
    Fault(
        "vllm: heads of two layers have one place in a cache",
        "placed = [(head, place) for place, head in enumerate(self.heads[layer][rank])]",
        "tests/test_vllm_raw_heads.py::test_every_head_of_a_rank_has_a_place_of_its_own",
    ),
    Fault(
        "vllm: a long chunk does without first tokens",
        "sinks = 0",
        "tests/test_triton_paged.py::test_entries_of_long_chunks_are_gathered",
    ),
    Fault(
        "arrows: a backend imports another",
        "from corecontext.ops import compose, partial, pooling, reference, sinks",
        "tests/test_arrows.py",
    ),
]


def find(fault: Fault, root: Path) -> Path:
    """Find the one file of the package that holds the fault's marker.

    Raises:
        ValueError: no file holds it, or it is there more than once.
    """
    lines = [
        path
        for folder in MARKED
        for path in sorted((root / folder).rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip() == fault.marker
    ]
    if len(lines) != 1:
        raise ValueError(
            f"the marker {fault.marker!r} must be in the package once, got {len(lines)} times."
        )
    return lines[0]


def planted(fault: Fault, source: str) -> str:
    """Replace the statement below the marker of a source text.

    Raises:
        ValueError: the fault's statement equals the one that it replaces.
    """
    lines = source.splitlines(keepends=True)
    marked = next(i for i, line in enumerate(lines) if line.strip() == fault.marker)
    first, last, indent = _statement_below(source, marked + 1)
    faulty = textwrap.indent(fault.statement.strip("\n"), " " * indent) + "\n"
    if _tokens(faulty) == _tokens("".join(lines[first:last])):
        raise ValueError(
            f"the fault {fault.name!r} must differ from the statement that it replaces."
        )
    return "".join([*lines[:first], faulty, *lines[last:]])


def _statement_below(source: str, line: int) -> tuple[int, int, int]:
    """Lines [first, last) and the indentation of the logical line at or below `line`, counted from
    0."""
    start: tuple[int, int] | None = None
    blank = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in blank:
            continue
        if start is None:
            start = token.start
        if token.type == tokenize.NEWLINE:
            if start[0] > line:
                return start[0] - 1, token.end[0], start[1]
            start = None
    raise ValueError("no statement follows the marker.")


def _tokens(code: str) -> list[str]:
    """The words of a statement, without spaces, line breaks and comments."""
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    readline = io.StringIO(textwrap.dedent(code)).readline
    return [
        token.string for token in tokenize.generate_tokens(readline) if token.type not in skipped
    ]


def run_tests(nodes: list[str], fault: Fault | None = None) -> tuple[bool, str]:
    """Whether the tests pass on a copy of the package with the fault in it, and the first error
    they print."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("corecontext", "tests", "benchmarks", "reproduction"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if fault is not None:
            path = find(fault, copy)
            path.write_text(planted(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            *nodes,
        ]
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    errors = [line[1:].strip() for line in done.stdout.splitlines() if re.match(r"E  +\S", line)]
    # The rows go into the documentation: no folder of this machine does.
    errors = [re.sub(r"(?:/[\w.-]+){2,}", "...", error) for error in errors]
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"pytest could not run {nodes}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
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
        for fault, (passed, message) in zip(
            chosen, pool.map(lambda fault: run_tests([fault.test], fault), chosen)
        ):
            caught &= not passed
            shown = (
                "**NOT CAUGHT**"
                if passed
                else f"`{message[:150].replace('|', '/').replace('`', '')}`"
            )
            print(f"| {fault.name} | `{fault.test.removeprefix('tests/')}` | {shown} |", flush=True)
    return 0 if caught else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
