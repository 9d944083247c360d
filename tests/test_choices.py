"""Rules of choosing groups on a pretrained model: the package's choice, and others."""

import pytest
import torch
from test_eval import write_lines
from test_real import data, model  # noqa: F401

from corecontext import cca_attention
from corecontext.baselines.sink_methods import StreamingLLM
from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.ops.fetch import query_blocks
from corecontext.ops.fetch.choice import to_marks
from corecontext.ops.spec import Spec, Tokens
from corecontext.record import make_record, read_records
from reproduction.command import main
from reproduction.real import choice_rules
from reproduction.real.attention import AttentionRun
from reproduction.real.choice_rules import Chooser, Rule
from reproduction.real.choice_tables import choices_markdown
from reproduction.real.material import Material
from reproduction.real.model import far_half
from reproduction.real.shared_rules import shared_choice, sharing_by

ROWS, KV_HEADS, QUERY_HEADS, LENGTH = 2, 3, 2, 160
SPEC = Spec(4, 8, 0.5, sink_size=4, fetch_groups=5, fetch_index="bits:2")
GROUPS = (LENGTH - SPEC.sinks) // SPEC.group_size


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Choose in blocks of 8 queries."""
    monkeypatch.setattr(choice_rules, "ELEMENTS", 8 * 12 * GROUPS * SPEC.group_size)


def some_tokens():
    generator = torch.Generator().manual_seed(0)
    n = ROWS * KV_HEADS
    q = torch.randn(n, QUERY_HEADS, LENGTH, 16, generator=generator)
    k, v = torch.randn(2, n, LENGTH, 16, generator=generator)
    return Tokens(2 * q, k + torch.randn(16, generator=generator), v)


def choice_of(text, spec=SPEC):
    """Return the groups of each query by a rule, [N, T, k], and their mean number."""
    chooser = Chooser(Rule.parse(text), KV_HEADS)
    groups = chooser.choose(some_tokens(), GROUPS, spec).groups
    return groups, chooser.mean_groups


def softmax(spec=SPEC):
    """Return the shares of groups in full attention, [N, r, T, M], 0 for unseen ones."""
    q, k = some_tokens()[:2]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    weights = (q @ k[:, None].mT * spec.scale).masked_fill(~causal, -torch.inf).softmax(-1)
    seen = torch.arange(GROUPS) < (torch.arange(LENGTH)[:, None] + 1 - 8) // 4 - 1
    return weights[..., spec.sinks :].unflatten(-1, (GROUPS, 4)).sum(-1) * seen, seen


@pytest.mark.parametrize("text", ["per_head:5", "adaptive:5:0", f"two_levels:5:{GROUPS}"])
def test_a_rule_that_leaves_nothing_out_is_the_package_s(text):
    groups, mean = choice_of(text)
    assert torch.equal(groups, query_blocks.choose(some_tokens(), GROUPS, SPEC).groups)
    assert mean == 5


@pytest.mark.parametrize("backend", ["packed", "reference"])
def test_the_control_attends_as_the_package_does(backend):
    q, k, v = (x.unflatten(0, (ROWS, KV_HEADS)) for x in some_tokens()[:3])
    options = {"group_size": 4, "window_size": 8, "sink_size": 4, "fetch_groups": 5}
    options |= {"fetch_index": "bits:2", "fetch_share": 1, "core_position": "token"}

    def attend():
        return cca_attention(q.flatten(1, 2), k, v, backend=backend, **options)

    expected = attend()
    outs = {}
    for text in ("per_head:5", "one_a_layer:5"):
        with Chooser(Rule.parse(text), KV_HEADS).enabled():
            outs[text] = attend()
    torch.testing.assert_close(outs["per_head:5"], expected)
    assert not torch.allclose(outs["one_a_layer:5"], expected)
    assert torch.equal(attend(), expected)


@pytest.mark.parametrize("method", ["one_a_layer", "largest_a_layer"])
def test_all_kv_heads_of_a_layer_have_one_choice(method):
    spec = SPEC.replace(fetch_index="oracle")
    groups, mean = choice_of(f"{method}:5", spec)
    by_row = groups.unflatten(0, (ROWS, KV_HEADS))
    assert torch.equal(by_row, by_row[:, :1].expand_as(by_row)) and mean == 5
    assert not torch.equal(by_row[0], by_row[1])
    shares, seen = softmax()
    values = shares.unflatten(0, (ROWS, KV_HEADS)).sum((1, 2))
    if method == "largest_a_layer":
        q, k = some_tokens()[:2]
        each = (q @ k[:, None, SPEC.sinks :].mT).unflatten(-1, (GROUPS, 4)).amax(-1)
        values = each.unflatten(0, (ROWS, KV_HEADS)).amax((1, 2))
    best = values.masked_fill(~seen, -torch.inf)[:, -40:].topk(5).indices.sort(-1).values
    assert torch.equal(by_row[:, 0, -40:].long(), best)


def test_groups_below_the_threshold_are_left_out():
    """By exact keys their shares are those of full attention."""
    groups, mean = choice_of(
        f"adaptive:{GROUPS}:0.02", SPEC.replace(fetch_index="oracle", fetch_groups=GROUPS)
    )
    shares, _ = softmax()
    expected = shares.amax(1) >= 0.02
    assert torch.equal(to_marks(groups, GROUPS), expected)
    assert mean == pytest.approx(float(expected[:, LENGTH // 2 :].sum(-1).double().mean()))
    assert 1 < mean < 20
    least = choice_of("adaptive:5:0.02")[0]
    assert -1 in least[:, LENGTH // 2 :] and not torch.equal(least, choice_of("per_head:5")[0])


def test_two_levels_choose_among_the_candidates():
    groups = to_marks(choice_of("two_levels:5:8")[0], GROUPS)
    by_mean = SPEC.replace(fetch_index="mean", fetch_groups=8)
    candidates = to_marks(query_blocks.choose(some_tokens(), GROUPS, by_mean).groups, GROUPS)
    assert not (groups & ~candidates).any()
    assert groups[:, LENGTH // 2 :].sum(-1).eq(5).all()
    package = to_marks(choice_of("per_head:5")[0], GROUPS)
    assert not torch.equal(groups, package)
    assert (groups | ~(package & candidates)).all()


@pytest.mark.parametrize("share", [1, 6, 16])
@pytest.mark.parametrize("first", [0, 70])
@pytest.mark.parametrize("rule", ["largest", "shares"])
def test_neighbours_choose_together(rule, first, share):
    """By exact keys; groups are among those that the last one sees."""
    spec = SPEC.replace(fetch_index="oracle", fetch_share=share)
    tokens = some_tokens().after(first)
    choice = shared_choice(rule, tokens, GROUPS, spec)
    values, seen = softmax()
    if rule == "largest":
        values = (some_tokens().q @ tokens.k[:, None, spec.sinks :].mT).unflatten(-1, (GROUPS, 4))
        values = values.amax(-1)
    begins = range(first - first % share, LENGTH, share)
    expected = []
    for begin in begins:
        at = slice(max(first, begin), min(begin + share, LENGTH))
        of_share = values[:, :, at]
        joined = of_share.amax((1, 2)) if rule == "largest" else of_share.sum((1, 2))
        expected.append(joined.masked_fill(~seen[at][-1], -torch.inf)[:, None])
    best = choice_rules.choose(torch.stack(expected, 2), seen[:1] | True, 5)
    assert choice.share == share and torch.equal(choice.groups, best)


@pytest.mark.parametrize("length", [8, 11, 12, 15])
def test_neighbours_of_a_short_prompt_choose_nothing(length):
    """Its last query sees no group."""
    tokens = some_tokens().until(length)
    spec = SPEC.replace(fetch_share=16)
    for rule in ("largest", "shares"):
        choice = shared_choice(rule, tokens, (length - spec.sinks) // spec.group_size, spec)
        assert choice.groups.eq(-1).all()


def test_prompts_share_a_choice_by_another_rule():
    q, k, v = (x.unflatten(0, (ROWS, KV_HEADS)) for x in some_tokens()[:3])
    options = {"group_size": 4, "window_size": 8, "sink_size": 4, "fetch_groups": 5}
    options |= {"fetch_index": "bits:2", "core_position": "token", "backend": "packed"}

    def attend(rule, share):
        with sharing_by(rule):
            return cca_attention(q.flatten(1, 2), k, v, fetch_share=share, **options)

    package = cca_attention(q.flatten(1, 2), k, v, fetch_share=16, **options)
    assert torch.equal(attend(None, 16), package)
    assert not torch.equal(attend("largest", 16), package)
    assert not torch.equal(attend("largest", 16), attend("shares", 16))
    assert torch.equal(attend("largest", 1), attend(None, 1))


@pytest.mark.parametrize(
    "text",
    ["per_head", "per_head:0", "per_head:5:2", "adaptive:5", "two_levels:5:4", "heads:5", "a:b:c"],
)
def test_other_rules_are_refused(text):
    with pytest.raises(UserError, match="choice must be per_head:K"):
        Rule.parse(text)


def test_the_command(model, tmp_path, capsys):  # noqa: F811
    model = str(model)
    texts = [f"Text {i}: " + " ".join(str(7 * i + j) for j in range(300)) for i in range(2)]
    write_lines(tmp_path / "lm_test.jsonl", [{"text": text} for text in texts])
    output = str(tmp_path / "choices.jsonl")
    base = ["choices", "--model", model, "--data", str(tmp_path), "--output", output]
    base += ["--length", "1024", "--windows", "2", "--device", "cpu"]
    rules = ["--choice", "per_head:3", "--choice", "adaptive:4:0.05", "--choice", "two_levels:3:6"]
    assert main([*base, *rules]) == 0
    records = read_records(output)
    assert [record.params["method"] for record in records] == ["per_head", "adaptive", "two_levels"]
    assert records[0].params["mean_groups"] == 3 and records[0].params["windows"] == 2
    assert records[1].params["threshold"] == 0.05 and records[2].params["candidates"] == 6
    assert 0 < records[1].params["mean_groups"] < 4
    assert [record.name for record in records] == 3 * ["choices.gain_kept"]
    # The package's own path.
    material = Material(model, str(tmp_path), device="cpu")
    windows = [window.ids for window in material.windows("lm_test", 1024, 2, most=1)]
    values = []
    for attention in (StreamingLLM(16, 512), CCAConfig.preset("default", fetch_groups=3), None):
        with AttentionRun(material.original, attention) as run:
            values.append(float(far_half(run.nll(windows).double().mean(0)).mean().exp()))
    assert records[0].params["of"] == pytest.approx(values)
    assert main([*base, "--choice", "per_head:40"]) == 2
    assert "length must have more groups than K" in capsys.readouterr().err
    assert main([*base, *rules, "--length", "512"]) == 2
    assert "length must be at least 1024" in capsys.readouterr().err


def test_needles_by_the_command(data, model, tmp_path):  # noqa: F811
    output = str(tmp_path / "choices.jsonl")
    base = ["choices", "--model", str(model), "--data", str(data), "--output", output]
    base += ["--windows", "0", "--needles", "2", "--needle-length", "320", "--device", "cpu"]
    assert main([*base, "--choice", "per_head:2", "--choice", "one_a_layer:2"]) == 0
    records = read_records(output)
    assert [record.name for record in records] == 2 * ["choices.accuracy"]
    places = [(r.params["task"], r.params["needles"], r.params["length"]) for r in records]
    assert places == 2 * [("needles", 2, 320)] and 0 < records[0].params["mean_groups"] < 2


def test_the_table_has_a_row_for_each_rule_and_its_newest_gain():
    def record(value, text, name="gemma-3-270m"):
        params = {"model": name, "length": 8192, "mean_groups": 100 * value}
        return make_record("choices.gain_kept", value, {**params, **Rule.parse(text).params()})

    records = [record(0.5, "two_levels:64:128"), record(0.3, "adaptive:128:0.001")]
    records += [record(0.9, "per_head:64", "smollm2-135m-instruct"), record(0.7, "per_head:64")]
    records += [record(0.4, "adaptive:128:0.002"), record(0.6, "two_levels:64:128")]
    head, _, *rows = choices_markdown(records).splitlines()
    assert head.startswith("| choice | groups, SmolLM2, 8,192 | gain, SmolLM2, 8,192 | groups, Gem")
    assert rows == [
        "| each KV head, k = 64 | 90.0 | 90.0 % | 70.0 | 70.0 % |  |  |",
        "| each KV head, shares of at least 0.001, k = 128 at most |  |  | 30.0 | 30.0 % |  |  |",
        "| each KV head, shares of at least 0.002, k = 128 at most |  |  | 40.0 | 40.0 % |  |  |",
        "| each KV head, of 128 groups by mean keys, k = 64 |  |  | 60.0 | 60.0 % |  |  |",
    ]
