import json
import math
import random

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlhf_core.config.data import ArithmeticSource, DataSource
from rlhf_core.data.drops import Dropped
from rlhf_core.data.errors import DataError
from rlhf_core.data.loading import interleaved, is_held_out, load_data
from rlhf_core.data.report import data_report


@pytest.fixture
def write(tmp_path):
    def written(name, rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return written


def texts(letter, count):
    return [{"text": f"{letter}{n}"} for n in range(count)]


def test_max_samples_takes_the_first_rows_and_leaves_the_held_out_ones(write):
    paths = {"path": write("a.jsonl", texts("a", 5)), "eval_path": write("b.jsonl", texts("b", 5))}
    data = load_data("sft", DataSource(**paths, max_samples=2))
    assert data.rows == texts("a", 2)
    assert data.held_out == texts("b", 5)


LOADER = "def load_rows(split):\n    return [{'text': 'a'}, {'text': 'b'}]\n"


def test_held_out_rows_that_are_the_training_rows_are_refused(tmp_path, write):
    """What shows in the rows alone: the only split by its name, a copy, a loader that does not look at the split."""
    (tmp_path / "only.json").write_text(json.dumps({"first": texts("a", 2)}))
    (tmp_path / "loader.py").write_text(LOADER)
    for source in (
        DataSource(path=f"{tmp_path}/only.json", eval_split="first"),
        DataSource(path=write("a.jsonl", texts("a", 2)), eval_path=write("b.jsonl", texts("a", 2)), max_samples=1),
        DataSource(path=f"{tmp_path}/loader.py", eval_split="test"),
    ):
        with pytest.raises(
            DataError, match=r"data set sft: the held-out rows \(.*\) are the training rows; set eval_sh"
        ):
            load_data("sft", source)


def test_splits_of_one_source(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"train": texts("a", 3), "test": texts("b", 2), "dev": texts("c", 1)}))
    data = load_data("sft", DataSource(path=str(path), eval_split="dev"))
    assert (data.rows, data.held_out) == (texts("a", 3), texts("c", 1))
    assert load_data("sft", DataSource(path=str(path), split="test")).rows == texts("b", 2)


def test_a_split_of_another_file_is_held_out(tmp_path, write):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"train": texts("b", 3), "test": texts("c", 2)}))
    source = DataSource(path=write("a.jsonl", texts("a", 3)), eval_path=str(other), eval_split="test")
    data = load_data("sft", source)
    assert (data.rows, data.held_out) == (texts("a", 3), texts("c", 2))
    assert data.sources[0].held_out is not None
    assert data.sources[0].held_out.name == f"{other} (test)"
    with pytest.raises(DataError, match=f"data file {other} has no split dev; set `split` to one of test, train"):
        load_data("sft", source.model_copy(update={"eval_split": "dev"}))


def test_a_share_is_held_out_whatever_the_order_and_the_format(write):
    rows = [{"prompt": f"p{n // 2}", "response": str(n)} for n in range(2000)]

    def held_out(rows, **source):
        data = load_data("sft", DataSource(path=write("a.jsonl", rows), eval_share=0.1, **source))
        assert len(data.rows) + len(data.held_out) == len(rows)
        assert not {row["prompt"] for row in data.rows} & {row["prompt"] for row in data.held_out}
        return {row["response"] for row in data.held_out}

    first = held_out(rows)
    assert 140 <= len(first) <= 260  # 100 of 1000 prompts, four standard deviations around
    assert held_out(random.Random(0).sample(rows, len(rows))) == first
    named = [{"question": row["prompt"], "answer": row["response"]} for row in rows]
    assert held_out(named, columns={"prompt": "question", "response": "answer"}) == first
    # A larger share holds out more, and what a smaller one did.
    wider = load_data("sft", DataSource(path=write("a.jsonl", rows), eval_share=0.2)).held_out
    assert first < {row["response"] for row in wider}


def test_a_conversation_is_held_out_by_what_precedes_its_first_answer():
    user, system = {"role": "user", "content": "p"}, {"role": "system", "content": "s"}
    answers = [{"role": "assistant", "content": text} for text in "ab"]
    for share in (0.01, 0.3, 0.5, 0.7, 0.99):
        first, other = ({"messages": [system, user, one, user, one]} for one in answers)
        assert is_held_out(first, share) == is_held_out(other, share)


def test_a_share_that_holds_out_nothing_is_refused(write):
    with pytest.raises(DataError, match=r"a\.jsonl: eval_share 0\.01 holds out 0 of 2 rows, by a hash of their prompt"):
        load_data("sft", DataSource(path=write("a.jsonl", texts("a", 2)), eval_share=0.01))


def test_sources_without_probabilities_come_one_after_the_other_each_in_its_shape(write):
    sources = [
        {"path": write("a.jsonl", [{"q": "1+2?", "a": "3"}]), "columns": {"prompt": "q", "response": "a"}},
        {"path": write("b.jsonl", [{"instruction": "Add", "output": "3"}] * 3), "max_samples": 2},
        {"arithmetic": {"rows": 2, "eval_rows": 1}},
    ]
    data = load_data("sft", DataSource.model_validate({"sources": sources}))
    first = [{"prompt": "1+2?", "response": "3"}, *[{"prompt": "Add", "response": "3"}] * 2]
    assert data.rows[:3] == first
    assert (len(data.rows), len(data.held_out), data.taken) == (5, 1, [1, 2, 2])
    assert [source.train.shape for source in data.sources] == ["prompt", "alpaca", "generated"]
    cut = load_data("sft", DataSource.model_validate({"sources": sources, "max_samples": 2}))
    assert (cut.rows, cut.taken) == (first[:2], [1, 1, 0])


def test_prompts_of_a_mixture_name_their_source(write):
    rows = [{"prompt": "1+2?", "label": 3}, {"prompt": "2+2?", "label": 4, "data_source": "own"}]
    parts = [
        {"path": write("a.jsonl", rows), "label": "easy"},
        {"path": write("b.jsonl", rows[:1])},
        {"path": write("c.jsonl", rows[:1])},
        {"arithmetic": {"rows": 1}},
    ]
    mixture = DataSource.model_validate({"sources": parts})
    assert mixture.labels == ["easy", "file", "file-2", "arithmetic"]
    data = load_data("eval", mixture)
    assert [row["source"] for row in data.rows] == ["easy", "own", "file", "file-2", "arithmetic"]
    assert data_report("eval", data)["duplicate_rows"] == 2  # whatever their source
    alone = load_data("eval", DataSource(path=write("d.jsonl", rows)))
    assert [row.get("source") for row in alone.rows] == [None, "own"]


@pytest.mark.parametrize(("counts", "probabilities"), [([5, 50], [0.5, 0.5]), ([300, 20, 7], [0.2, 0.7, 0.1])])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mixture_draws_as_datasets_does(counts, probabilities, seed):
    parts = [datasets.Dataset.from_list([{"s": s, "r": r} for r in range(count)]) for s, count in enumerate(counts)]
    wanted = datasets.interleave_datasets(parts, probabilities, seed=seed, stopping_strategy="all_exhausted")
    assert list(interleaved(counts, probabilities, seed)) == [(row["s"], row["r"]) for row in wanted]


def test_probabilities_that_are_rounded_are_as_good_as_exact_ones(write):
    parts = [{"path": write(f"{one}.jsonl", texts(one, 5)), "probability": 0.3333333} for one in "abc"]
    data = load_data("sft", DataSource.model_validate({"sources": parts}))
    assert {row["text"][0] for row in data.rows} == set("abc")
    assert list(interleaved([5] * 3, [0.3333333] * 3, 0)) == list(interleaved([5] * 3, [1 / 3] * 3, 0))


def test_max_samples_ends_the_drawing_however_rare_a_source_is(write):
    """Without it this one would draw about 10^9 times before the second source is gone through."""
    parts = [
        {"path": write(f"{one}.jsonl", texts(one, 2)), "probability": p} for one, p in (("a", 1 - 1e-9), ("b", 1e-9))
    ]
    data = load_data("sft", DataSource.model_validate({"sources": parts, "max_samples": 5}))
    assert [row["text"] for row in data.rows] == ["a0", "a1", "a0", "a1", "a0"]
    assert data.taken == [5, 0]


def test_a_mixture_of_files_is_drawn_from_its_seed(write):
    paths = [write("a.jsonl", texts("a", 4)), write("b.jsonl", texts("b", 60))]

    def mixed(**more):
        parts = [{"path": path, "probability": share} for path, share in zip(paths, (0.25, 0.75), strict=True)]
        return load_data("sft", DataSource.model_validate({"sources": parts, **more}))

    data = mixed()
    order = list(interleaved([4, 60], [0.25, 0.75], 0))
    assert data.rows == [{"text": f"{'ab'[source]}{row}"} for source, row in order]
    assert data.taken == [sum(source == which for source, _ in order) for which in (0, 1)]
    assert {row["text"] for row in data.rows} == {row["text"] for row in texts("a", 4) + texts("b", 60)}
    assert mixed().rows == data.rows != mixed(seed=1).rows
    assert mixed(max_samples=10).rows == data.rows[:10]


ROWS = [
    {"prompt": "a", "response": "b"},
    {"prompt": "a", "response": 7},
    {"prompt": "", "response": "b"},
    {"prompt": "a", "response": 8},
]


def test_a_bad_row_is_refused_with_its_number(write):
    path = write("a.jsonl", ROWS)
    with pytest.raises(DataError) as caught:
        load_data("sft", DataSource(path=path))
    assert str(caught.value) == (
        f"data set sft: row 2 of {path}: column response is not text: it holds int 7; give a string; mend it, or set "
        "on_bad_row: drop"
    )


def test_bad_rows_are_dropped_and_counted_by_reason_where_asked_for(write):
    # The first row twice: the held-out rows are others than the training rows, and are dropped alike.
    source = DataSource(path=write("a.jsonl", ROWS), eval_path=write("b.jsonl", ROWS + ROWS[:1]), on_bad_row="drop")
    data = load_data("sft", source)
    dropped = {
        "column response is not text": Dropped(2, 2, "column response is not text: it holds int 7; give a string"),
        "nothing in column prompt": Dropped(1, 3, "nothing in column prompt"),
    }
    (loaded,) = data.sources
    assert loaded.held_out is not None
    assert (data.rows, data.held_out) == (ROWS[:1], ROWS[:1] * 2)
    assert loaded.train.dropped == loaded.held_out.dropped == dropped
    assert (loaded.train.read, loaded.held_out.read) == (4, 5)


def test_pairs_of_equal_responses_are_always_dropped_and_counted(write):
    rows = [{"prompt": "p", "chosen": a, "rejected": b} for a, b in ("xy", "zz", "yx", "xx")]
    data = load_data("pairs", DataSource(path=write("a.jsonl", rows)))
    assert data.rows == [rows[0], rows[2]]
    assert data.sources[0].train.dropped == {"chosen equals rejected": Dropped(2, 2, "chosen equals rejected")}
    path = write("b.jsonl", [rows[1], rows[3]])
    with pytest.raises(DataError) as caught:
        load_data("pairs", DataSource(path=path))
    assert str(caught.value) == (
        f"data set pairs: none of the 2 rows of {path} can be used: chosen equals rejected (2); mend them"
    )


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("sft", {"text": "a \ud83d b"}, r"a text has half a character, a lone surrogate: '\ud83d'"),
        ("pairs", {"prompt": "p", "chosen": "a", "rejected": "b", "margin": math.inf}, "column margin is not a number"),
        ("prompts", {"prompt": "p", "label": math.inf}, "column label is not text: it holds float inf"),
        (
            "sft",
            {"prompt": "p", "response": "r", "tools": [{"name": "f", "default": math.nan}]},
            "a value that JSON does not have: Out of range float values are not JSON compliant",
        ),
    ],
)
def test_what_json_files_hold_and_no_row_can_is_refused_with_its_place(write, kind, row, message):
    path = write("a.jsonl", [row])
    with pytest.raises(DataError) as caught:
        load_data(kind, DataSource(path=path))
    assert str(caught.value).startswith(f"data set {kind}: row 1 of {path}: {message}")


def test_what_fits_no_shape_names_the_file_and_the_mapping(write):
    path = write("a.jsonl", [{"question": "a", "label": "b"}])
    with pytest.raises(DataError) as caught:
        load_data("prompts", DataSource(path=path))
    assert str(caught.value).startswith(f"data set prompts: {path} fits no shape of this data set (prompt: prompt + ")
    assert str(caught.value).endswith("map them, e.g. columns: {prompt: question}")


def test_a_mapping_of_a_column_that_is_not_there_names_the_file(tmp_path, write):
    path = write("a.jsonl", [{"instruction": "Add", "context": "1, 2", "output": "3"}])
    with pytest.raises(DataError) as caught:
        load_data("sft", DataSource(path=path, columns={"input": "contxt"}))
    assert str(caught.value) == (
        f"data set sft: {path} has no column contxt (for input), which `columns` maps; it has context, instruction, "
        "output"
    )
    # A column that is there and empty is one, in Arrow's files too.
    table = pyarrow.table({"instruction": ["Add"], "output": ["3"], "context": pyarrow.array([None], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    data = load_data("sft", DataSource(path=f"{tmp_path}/a.parquet", columns={"input": "context"}))
    assert data.rows == [{"prompt": "Add", "response": "3"}]


SOLUTIONS = '''
import json

def load_rows(split):
    """Every model solution of each question, with whether it is right."""
    for line in open({path!r}):
        row = json.loads(line)
        for model in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            solution = row[model]
            yield dict(prompt=row["question"], response=solution["solution"], label=solution["is_correct"])
'''


def test_model_solutions_through_a_loader(test_data, tmp_path):
    path = test_data / "gsm8k" / "example_model_solutions.jsonl"
    loader = tmp_path / "solutions.py"
    loader.write_text(SOLUTIONS.format(path=str(path)))
    data = load_data("labelled", DataSource(path=str(loader), eval_share=0.1))
    rows = [json.loads(line) for line in path.open()]
    right = [one["is_correct"] for row in rows for name, one in row.items() if isinstance(one, dict)]
    assert len(data.rows) + len(data.held_out) == len(right) == 5276
    assert sum(row["label"] for row in data.rows + data.held_out) == sum(right)
    # All four solutions of a question are on one side.
    assert len(data.held_out) % 4 == 0


def test_generated_sets_hold_out_what_they_hold_out():
    spec = ArithmeticSource(rows=300, eval_rows=50)
    data = load_data("pairs", DataSource(arithmetic=spec))
    evaluation = load_data("eval", DataSource(arithmetic=ArithmeticSource(rows=60))).rows
    assert (len(data.rows), len(data.held_out), len(evaluation)) == (300, 50, 60)
    assert not {row["prompt"] for row in data.rows} & {row["prompt"] for row in [*data.held_out, *evaluation]}


def test_generated_labelled_rows_are_right_where_they_say_so():
    rows = load_data("labelled", DataSource(arithmetic=ArithmeticSource(rows=200))).rows
    sums = [sum(map(int, row["prompt"].rstrip("=").split("+"))) for row in rows]
    answers = [int(row["response"].split("#")[1]) for row in rows]
    assert [row["label"] for row in rows] == [total == answer for total, answer in zip(sums, answers, strict=True)]
    assert sum(row["label"] for row in rows) == 100


def test_more_prompts_than_problems_is_one_line():
    with pytest.raises(DataError, match="data set prompts: rows is 99999, but the train split has"):
        load_data("prompts", DataSource(arithmetic=ArithmeticSource(rows=99999)))
