"""Load a pretrained model and its texts, each once for all measurements of a process."""

import sys
from collections.abc import Callable, Hashable
from functools import cached_property
from pathlib import Path
from typing import Any

from corecontext.data.readers import find_file, read_documents
from corecontext.integrations.hf.gguf_files import local_model
from corecontext.loading import Loaded, load
from reproduction.real.tasks import Question, list_questions, needle_questions
from reproduction.real.texts import Window, cut_windows
from reproduction.real.training import RememberedTeacher


class Material:
    """A pretrained model, its texts, and the teacher of all trainings.

    Args:
        model: Folder, GGUF file, or the name of a packaged model.
        data: Folder with the texts.
        dtype, device: Of loaded models.
    """

    def __init__(self, model: str, data: str, dtype: str = "auto", device: str = "auto") -> None:
        self.folder = local_model(model)
        self.name = Path(self.folder).name.lower()
        self.data = data
        self.dtype = dtype
        self.device = device
        self.teachers: dict[str, RememberedTeacher] = {}
        """The teacher of all methods' trainings, once there is one."""
        self._windows: dict[tuple[str, int, int | None], tuple[int, list[Window]]] = {}
        """Windows of a text by its name, their length and how many of a document at most; with the
        number that was asked for."""
        self._made: dict[Hashable, Any] = {}

    @cached_property
    def original(self) -> Loaded:
        """The model as it is, under full attention."""
        return self.load(self.folder)

    @cached_property
    def essays(self) -> str:
        """The text around needles."""
        path = find_file(self.data, ("haystack_essays",))
        return "\n\n".join(text for _, _, text in read_documents(path))

    def load(self, folder: str) -> Loaded:
        """Load a model of a folder, under full attention."""
        return load(folder, method="full", dtype=self.dtype, device=self.device)

    def windows(self, name: str, length: int, count: int, most: int | None = None) -> list[Window]:
        """Return windows of a text; arguments as of `cut_windows`. Fewer windows are the first of
        those that were cut before."""
        asked, windows = self._windows.get((name, length, most), (0, []))
        if count > asked:
            path = find_file(self.data, (name,))
            windows = cut_windows(path, self.original.tokenizer, length, count, most)
            self._windows[name, length, most] = count, windows
            if len(windows) < count:
                print(f"{name} has {len(windows)} windows of {count}", file=sys.stderr)
        return windows[:count]

    def needles(self, length: int, count: int, seed: int) -> list[Question]:
        """Return questions for a hidden number; arguments as of `needle_questions`."""

        def ask() -> list[Question]:
            return needle_questions(self.essays, self.original.tokenizer, length, count, seed)

        return self._once(("needles", length, count, seed), ask)

    def lists(self, count: int, seed: int) -> list[Question]:
        """Return questions for many records; arguments as of `list_questions`."""

        def ask() -> list[Question]:
            return list_questions(self.essays, self.original.tokenizer, count, seed)

        return self._once(("lists", count, seed), ask)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made at the first call."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
