"""The command line of the comparison of rules of choosing: `python -m reproduction choices`."""

from typing import Annotated

import typer

from corecontext.cli.options import MODEL_HELP, Device, Dtype, Seed
from corecontext.files import UserError
from reproduction.real.choice_rules import FORMS, Rule
from reproduction.real.methods import Sizes

DEFAULT_CHOICES = (
    *("per_head:64", "per_head:48", "per_head:32", "per_head:16"),
    *("one_a_layer:64", "one_a_layer:32", "largest_a_layer:64", "largest_a_layer:32"),
    *("adaptive:128:0.0005", "adaptive:128:0.001", "adaptive:128:0.002"),
    *("two_levels:64:256", "two_levels:64:128", "two_levels:32:64"),
)


def choices(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    data: Annotated[
        str, typer.Option(help="Folder with lm_test and haystack_essays (.jsonl, .xz).")
    ] = "",
    choice: Annotated[
        list[str],
        typer.Option(help=f"{FORMS}; may be repeated."),
    ] = list(DEFAULT_CHOICES),
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 8192,
    windows: Annotated[
        int, typer.Option(help="Windows, each of another document; 0 measures no gain.")
    ] = 8,
    needles: Annotated[int, typer.Option(help="Needles; 0 asks for none.")] = 0,
    needle_length: Annotated[int, typer.Option(help="Tokens of a needle's prompt.")] = 7900,
    seed: Seed = 0,
    output: Annotated[str, typer.Option(help="File that records are appended to.")] = (
        "results/choices.jsonl"
    ),
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Rules by which fetch chooses groups, on a pretrained model: gain kept by the groups read, and
    needles (docs/fetch-results.md)."""
    from corecontext.cli.options import check_appended, check_least
    from reproduction.real.choices import ChoiceStudy
    from reproduction.real.material import Material

    check_appended(output)
    check_least(0, windows=windows, needles=needles)
    check_least(2 * Sizes.window_size, length=length)
    rules = [Rule.parse(text) for text in choice]
    if not data:
        raise UserError("data must be given, got none. Use --data FOLDER.")
    material = Material(model, data, dtype, device)
    texts = material.windows("lm_test", length, windows, most=1) if windows else []
    study = ChoiceStudy(material, texts, output)
    if texts:
        study.gains(rules)
    if needles:
        study.needles(rules, material.needles(needle_length, needles, seed), needle_length)
