"""The answer `questions`: the numbers of the documentation's queries, and what is not known."""

from rollstream.look.explorer.answers.questions import round_seconds, round_width


def test_the_example_archive_answers_as_its_documentation_states(example) -> None:
    found = example.json("r/0/questions")
    assert [row["tokens"] for row in found["lags"]] == [7418, 14254, 7683, 2189]
    assert [row["prompts"] for row in found["solved"]] == [16, 18, 15, 16, 15, 12, 21, 23, 28]
    assert [round(row["logprob"], 4) for row in found["sureness"]] == [-0.5476, -0.0351]
    assert found["unsolved"][0]["tokens"] == 160.0
    assert {row["prompt"] for row in found["unsolved"][:2]} == {"<bos>064%11", "<bos>539%61"}
    assert round(found["waits"]["median_s"], 2) == 0.87
    assert sum(one["trajectories"] for one in found["waits"]["bins"]) == 920
    endings = [(row["ended"], row["groups"]) for row in found["endings"]]
    assert endings == [("trained", 120), ("filtered", 28), ("filtered", 16)]
    first = next(row for row in found["lengths"] if row["from_tokens"] == 20)
    assert (first["answers"], round(first["reward"], 6)) == (299, 0.829431)
    assert round(found["pickup"][0]["ms_per_token"], 4) == 28.2991
    assert {row["name"] for row in found["scores"] if row["from_version"] == 0} >= {"style/full"}


def test_a_living_run_answers_from_its_log(living) -> None:
    found = living.json("r/0/questions")
    assert sum(row["groups"] for row in found["endings"]) == 4
    assert found["sureness"] is not None
    assert found["solved"], "rewards between 0 and 1 are counted by their mean"


def test_bins_have_round_widths() -> None:
    assert [round_width(length, 10) for length in (1, 10, 11, 160, 4096)] == [1, 1, 2, 20, 500]
    assert [round_seconds(least) for least in (0.0, 0.32, 0.5, 7.0)] == [0.001, 0.5, 0.5, 10.0]
