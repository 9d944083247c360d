"""List the tasks of the laboratory: those of `corecontext compare`, and the suites."""

from functools import partial

from corecontext.eval.combine import scores_by
from corecontext.eval.task_table import TASKS, Task
from reproduction.suites import longbench, mmlu, ruler, ruler_data

SUITES = TASKS | {
    task.name: task
    for task in (
        Task("ruler", ruler.items, ruler_data.FILES, ruler.combine, ruler.WITHOUT_FILES),
        Task("mmlu", mmlu.items, mmlu.FILES, partial(scores_by, "subtask")),
        Task("longbench", longbench.items, longbench.FILES, longbench.combine),
    )
}
