"""The parts of training: settings and recipes, the loss in chunks, checkpoints' names."""

import copy
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from families import tiny_model, tokens

from corecontext.config import PAPER_RULE, CCAConfig, field_help, listed
from corecontext.files import UserError
from corecontext.inference.fuse import MOST_PARTS, Fused
from corecontext.train import loss as loss_module
from corecontext.train.loss import Taught, chunked_cross_entropy, compute_loss_in_chunks
from corecontext.train.student import make_model, prepare_config
from corecontext.train.teacher import Teacher, load_teacher
from corecontext.train.train_config import METHODS, TrainConfig, load_recipe


def test_the_loss_of_a_batch_without_labels_is_0():
    hidden, weight = (torch.ones(rows, 4).requires_grad_() for rows in (6, 5))
    loss = chunked_cross_entropy(hidden, weight, torch.full((6,), -100), torch.tensor(0), 4)
    assert loss == 0
    for grad in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_loss_in_chunks_is_the_loss(dtype, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 16, generator=generator).to(dtype).requires_grad_() for rows in (37, 50)
    )
    labels = torch.randint(0, 50, (37,), generator=generator)
    labels[[3, 20]] = -100
    logits = F.linear(hidden, weight).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels, reduction="sum") / 35
    wanted = torch.autograd.grad(expected, (hidden, weight))
    for chunk in (1, 8, 100):
        loss = chunked_cross_entropy(hidden, weight, labels, 35, chunk, softcap=softcap)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), wanted):
            torch.testing.assert_close(
                got,
                want,
                rtol=1e-5 if dtype == torch.float32 else 3e-2,
                atol=1e-7 if dtype == torch.float32 else 1e-3,
            )
    frozen = chunked_cross_entropy(hidden, weight.detach(), labels, 35, 8, softcap=softcap)
    torch.testing.assert_close(
        torch.autograd.grad(frozen, hidden)[0], wanted[0], rtol=3e-2, atol=1e-3
    )
    assert not chunked_cross_entropy(hidden.detach(), weight.detach(), labels, 35, 8).requires_grad


def mixed(logits, labels, taught, share):
    """The loss of a distilled run, dense: [T, V] logits of student and teacher in float64."""
    counted = labels != -100
    p = taught[counted].softmax(-1)
    far = (p * (p.log() - logits[counted].log_softmax(-1))).sum()
    return (1 - share) * F.cross_entropy(logits, labels, reduction="sum") + share * far


@pytest.mark.parametrize("softcap, teachers", [(None, None), (3.0, 3.0), (None, 2.0)])
def test_a_teacher_gives_the_divergence_and_its_gradient(softcap, teachers):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, taught, head = (
        torch.randn(rows, width, generator=generator)
        for rows, width in ((37, 16), (50, 16), (37, 24), (50, 24))
    )
    hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.randint(0, 50, (37,), generator=generator)
    labels[[3, 20]] = -100

    def capped(logits, cap):
        return logits if cap is None else cap * torch.tanh(logits / cap)

    wanted = capped(F.linear(taught.double(), head.double()), teachers)
    for share in (0.25, 1.0):
        expected = (
            mixed(
                capped(F.linear(hidden.double(), weight.double()), softcap), labels, wanted, share
            )
            / 35
        )
        want = torch.autograd.grad(expected, (hidden, weight))
        for chunk in (1, 8, 100):
            loss = chunked_cross_entropy(
                hidden,
                weight,
                labels,
                35,
                chunk,
                softcap=softcap,
                taught=Taught(taught, head, share, teachers),
            )
            torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
            for got, one in zip(torch.autograd.grad(loss, (hidden, weight)), want):
                torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-6)
    plain, none = (
        chunked_cross_entropy(hidden, weight, labels, 35, 8, softcap=softcap, taught=one)
        for one in (None, Taught(taught, head, 0.0, teachers))
    )
    assert torch.equal(plain, none)
    for a, b in zip(
        torch.autograd.grad(plain, (hidden, weight)), torch.autograd.grad(none, (hidden, weight))
    ):
        assert torch.equal(a, b)
    itself = Taught(hidden.detach(), weight.detach(), 1.0, softcap)
    same = chunked_cross_entropy(hidden, weight, labels, 35, 8, softcap=softcap, taught=itself)
    assert same.abs() < 1e-6 and torch.autograd.grad(same, hidden)[0].abs().max() < 1e-6


def test_the_kernel_takes_what_it_computes():
    def takes(dtype=torch.bfloat16, is_cuda=True, softcap=None, taught=None):
        hidden = SimpleNamespace(dtype=dtype, is_cuda=is_cuda)
        return loss_module._has_kernel(hidden, softcap, taught)

    pytest.importorskip("triton")
    assert takes() and takes(torch.float16) and takes(torch.float32)
    assert takes(taught=Taught(None, None, 0.5)) and not takes(taught=Taught(None, None, 0.5, 30.0))
    assert not takes(torch.float64) and not takes(is_cuda=False) and not takes(softcap=30.0)


@pytest.mark.parametrize(
    "dtype, share", [(torch.float32, 0.0), (torch.float32, 0.5), (torch.bfloat16, 0.25)]
)
def test_the_kernel_gives_the_loss_and_its_gradient(dtype, share, monkeypatch):
    """Over two blocks of the vocabulary, the second one not full."""
    kernel = pytest.importorskip("corecontext.train.loss_kernel")
    monkeypatch.setattr(kernel, "MOST_COLUMNS", 32)
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, theirs, head = (
        (3 * torch.randn(rows, 16, generator=generator)).to(device, dtype)
        for rows in (7, 50, 7, 50)
    )
    labels = torch.randint(0, 50, (7,), generator=generator).to(device)
    labels[:4] = torch.tensor([0, 49, 32, -100])
    taught = Taught(theirs, head, share) if share else None
    results = []
    for has_kernel in (True, False):
        monkeypatch.setattr(loss_module, "_has_kernel", lambda *arguments, has=has_kernel: has)
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        loss = chunked_cross_entropy(*leaves, labels, 5, 4, taught=taught)
        evaluated = chunked_cross_entropy(hidden, weight, labels, 5, 4, taught=taught)
        assert torch.equal(evaluated, loss)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
        arguments = (hidden, weight, labels, 5, 4, None, taught)
        results[-1] += (loss_module._ChunkedLoss.apply(*arguments)[1],)
    for got, wanted in zip(*results):
        error = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, wanted, rtol=error, atol=error)
    logits = (hidden @ weight.T).contiguous()
    before = logits.clone()
    kernel.chunk_loss(logits, None, labels, torch.ones((), device=device), 0.0, False)
    assert torch.equal(logits, before)  # no gradient takes their place


@pytest.mark.parametrize("share", [None, 0.5])
def test_logits_of_one_chunk_exist_at_a_time(share, monkeypatch):
    """The student's and, where there is one, the teacher's; those of a large vocabulary are what
    memory is short of."""
    hidden, weight = torch.randn(40, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    taught = share and Taught(torch.randn(40, 8), torch.randn(50, 8), share)
    real, alive, most = loss_module._logits, [], []

    def watched(*args):
        logits, slope = real(*args)
        alive.append(weakref.ref(logits))
        most.append(sum(one() is not None for one in alive))
        return logits, slope

    monkeypatch.setattr(loss_module, "_logits", watched)
    chunked_cross_entropy(hidden, weight, torch.zeros(40, dtype=torch.long), 40, 10, taught=taught)
    assert most == ([1, 2] * 4 if share else [1] * 4)


@pytest.mark.parametrize(
    "family, changes",
    [("llama", {}), ("gemma3", {}), ("qwen2-hybrid", {}), ("granite", {"logits_scaling": 0.4})],
)
def test_a_teacher_is_the_model_under_full_attention_with_documents_apart(
    family, changes, tmp_path
):
    tiny_model(family, **changes).save_pretrained(tmp_path)
    config = TrainConfig(
        model=str(tmp_path),
        distil=0.5,
        group_size=4,
        window_size=8,
        rope_theta=5e5,
        context_length=40,
    )
    student = make_model(config, prepare_config(config), bfloat16=False)
    teacher = load_teacher(config, bfloat16=False, device=torch.device("cpu"))
    assert not teacher.model.training
    assert not any(p.requires_grad for p in teacher.model.parameters())
    assert teacher.model.config._attn_implementation == "sdpa"
    assert student.config._attn_implementation == "cca"
    ids, labels = tokens(2, 40), tokens(2, 40, 1)
    labels[0, 5:9] = -100
    # Two documents in each row.
    positions = torch.cat((torch.arange(13), torch.arange(27))).expand(2, 40)
    with torch.no_grad():
        whole = tiny_model(family, **changes)
        wanted = torch.cat(
            [whole(ids[:, part]).logits for part in (slice(13), slice(13, 40))], 1
        ).double()
    logits = student.train()(ids, position_ids=positions).logits.double()
    expected = mixed(logits.flatten(0, 1), labels.flatten(), wanted.flatten(0, 1), 0.5) / 76
    want = torch.autograd.grad(expected, list(student.parameters()))
    compute_loss_in_chunks(student, 7, teacher)
    loss = student(ids, position_ids=positions, shift_labels=labels).loss
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-5)
    for got, one in zip(torch.autograd.grad(loss, list(student.parameters())), want):
        torch.testing.assert_close(got, one, rtol=1e-3, atol=1e-5)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).float()
    torch.testing.assert_close(
        student.eval()(ids, position_ids=positions, shift_labels=labels).loss, plain
    )


def test_a_fused_teacher_says_the_same_in_as_many_ways_as_its_norms_need(compile_by):
    """Gemma has norms of layers and of heads, and the student's learn: torch stops at eight kinds
    of a function."""
    model, ids, positions = tiny_model("gemma3"), tokens(2, 40), torch.arange(40).expand(2, 40)
    compile_by("aot_eager")
    plain, fused = Teacher(model, 0.5), Teacher(model, 0.5, "compile")
    counters = torch._dynamo.utils.counters
    graphs, before = counters["stats"]["unique_graphs"], torch._dynamo.config.recompile_limit
    with torch.no_grad():
        torch.testing.assert_close(
            fused(ids, positions).hidden, plain(ids, positions).hidden, rtol=1e-4, atol=1e-5
        )
    assert counters["stats"]["unique_graphs"] > graphs
    assert torch._dynamo.config.recompile_limit == before
    assert all(module._compiled_call_impl is None for module in model.modules())
    with Fused(model), Fused(model, None):
        # Transformers may have set more.
        assert torch._dynamo.config.recompile_limit == max(before, MOST_PARTS)
    assert torch._dynamo.config.recompile_limit == before


def test_a_teacher_is_refused_where_the_loss_is_not_in_chunks():
    peft = pytest.importorskip("peft")
    routed, biased = tiny_model("qwen3_moe", output_router_logits=True), tiny_model()
    biased.lm_head = torch.nn.Linear(48, 96)
    wrapped = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["lm_head"]))
    scaled = tiny_model(logit_scale=3.0)  # as in architectures whose rule is not known
    for model in (routed, biased, wrapped.base_model.model, scaled):
        with pytest.raises(
            UserError,
            match="distil must be 0 where the loss cannot be computed in chunks, got a mode",
        ):
            compute_loss_in_chunks(model, 7, lambda: None)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {}),
        ("gemma2", {}),
        ("qwen3_moe", {}),
        ("granite", {"logits_scaling": 0.3}),
        ("granitemoe", {"logits_scaling": 3.0}),
    ],
)
def test_a_model_computes_its_own_loss_in_chunks(family, changes):
    whole = tiny_model(family, **changes)
    chunked = copy.deepcopy(whole)
    compute_loss_in_chunks(chunked, 7)
    ids = tokens(2, 30)
    labels = ids.clone()
    labels[0, 5:9] = -100
    for options in ({"labels": labels}, {"labels": labels, "num_items_in_batch": torch.tensor(11)}):
        for model in (whole, chunked):
            model.zero_grad()
        expected, loss = (model(ids, **options).loss for model in (whole, chunked))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        expected.backward()
        loss.backward()
        for a, b in zip(chunked.parameters(), whole.parameters()):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    shifted = chunked(ids, shift_labels=F.pad(labels, (0, 1), value=-100)[:, 1:]).loss
    torch.testing.assert_close(shifted, whole(ids, labels=labels).loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(chunked(ids).logits, whole(ids).logits)  # without labels nothing changes


def test_heads_that_are_no_plain_matrix_are_not_taken_for_one():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    )
    inner, ids = model.base_model.model, tokens(1, 30)
    expected = model(ids, labels=ids).loss
    compute_loss_in_chunks(inner, 7)
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    split, asked = tiny_model(), []
    split.lm_head.unshard = lambda: asked.append("whole")  # as FSDP's modules have it
    compute_loss_in_chunks(split, 7)
    split(ids, labels=ids)
    assert asked == ["whole"]


def test_what_learns_is_kept_in_float32_and_only_matrices_decay(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from transformers import TrainingArguments

    from corecontext.train.trainer import CCATrainer

    # Its attention begins with a frozen matrix.
    tiny_model("phi3").bfloat16().save_pretrained(tmp_path)
    config = TrainConfig(model=str(tmp_path), strategy="partial", group_size=4, window_size=8)
    model = make_model(config, prepare_config(config), bfloat16=True)
    learns = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition("_attn.")[2] for name in learns} == {"qkv_proj.weight"}
    assert set(learns.values()) == {torch.float32} and model.dtype == torch.bfloat16
    trainer = CCATrainer(model, TrainingArguments(str(tmp_path / "run"), use_cpu=True))
    decay = [name for name in trainer.get_decay_parameter_names(model) if name in learns]
    assert decay == list(learns)


def test_the_help_names_the_choices_of_the_tables():
    """The documentation shows these strings as they are written, so no code can fill them in."""
    assert field_help(TrainConfig)["method"].endswith(f": {listed(METHODS)}.")


def test_first_tokens_are_raw_but_under_the_papers_rule_and_in_old_runs(tmp_path):
    assert load_recipe("paper").cca() == CCAConfig.paper()
    assert load_recipe("fetch").cca() == CCAConfig()
    saved = tmp_path / "train_config.json"
    old = {name: x for name, x in TrainConfig().to_dict().items() if name not in PAPER_RULE}
    saved.write_text(json.dumps(old))  # of a user: today's defaults
    assert load_recipe(str(saved)).cca() == CCAConfig()
    saved.write_text(json.dumps({"config": old}))  # of a run before these fields existed
    assert load_recipe(str(saved)).cca() == CCAConfig.paper()
