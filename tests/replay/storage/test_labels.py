"""Labels and notes: kept and changed, and never part of what is trained on."""

from contextlib import closing
from pathlib import Path

import pytest

from replay import InvalidRecord, ReplayError, ReplayStore, questions
from replay.exchange import export_file, import_file
from replay.storage.labels import this_user
from tests.fakes.records import RUN, draw, iterate, new_store, put, trajectory


def said(store: ReplayStore, id: str) -> list[tuple[str, str | None, str]]:
    return [(each["label"], each["note"], each["made_by"]) for each in questions.overview(store, id)["labels"]]


def test_a_label_is_said_again_with_another_note_and_taken_away(store: ReplayStore) -> None:
    put(store, trajectory("one"), trajectory("two"))
    assert store.labels.add(["one", "two", "one"], "good", "at first", by="ann") == 2
    store.labels.add(["one"], "good", "later")
    store.labels.add(["one"], "needs review", by="bo")
    store.labels.add([RUN], "baseline", on="run")
    assert said(store, "one") == [("good", "later", this_user()), ("needs review", None, "bo")]
    assert said(store, "two") == [("good", "at first", "ann")]
    assert [each["label"] for each in questions.run_labels_of(store, RUN)] == ["baseline"]
    assert [store.labels.remove(["one", "two"], "good"), store.labels.remove(["one"], "good")] == [2, 0]
    assert [row["labels"] for row in questions.page(store)["rows"]] in ([[], ["needs review"]], [["needs review"], []])
    assert store.verify().damage == []


def test_what_is_no_label_or_not_stored_is_refused_and_nothing_written(store: ReplayStore) -> None:
    put(store, trajectory("one"))
    rule = "be words of letters, digits, _ . : - with one space between each two"
    for wrong in ("", "two  spaces", "it's", "good\n"):
        with pytest.raises(InvalidRecord, match=f"^label must {rule}, got "):
            store.labels.add(["one"], wrong)
    with pytest.raises(InvalidRecord, match="label must have at most 64 characters"):
        store.labels.add(["one"], "x" * 65)
    with pytest.raises(InvalidRecord, match="made_by must have at most 200 characters"):
        store.labels.add(["one"], "good", by="x" * 201)
    with pytest.raises(ReplayError, match="must be that of a stored trajectory, got 'none'"):
        store.labels.add(["one", "none"], "good")
    assert said(store, "one") == []


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_an_export_has_labels_and_an_import_keeps_them_beside_those_there(tmp_path: Path, ending: str) -> None:
    files = [tmp_path / f"{name}.{ending}" for name in ("first", "second")]
    with closing(new_store(tmp_path / "from.sqlite")) as store, closing(new_store(tmp_path / "to.sqlite")) as other:
        put(store, trajectory("one"), trajectory("two"))
        store.labels.add(["one"], "good", "a note \0 of it", by="ann")
        store.labels.add(["one"], "odd")
        store.labels.add([RUN], "baseline", "of all", on="run")
        export_file(store, files[0])
        import_file(other, files[0], name=None)
        export_file(other, files[1])
        assert files[0].read_bytes() == files[1].read_bytes()
        assert said(other, "one") == said(store, "one") != []
        other.labels.add(["one"], "good", "mine")
        other.labels.remove(["one"], "odd")
        assert import_file(other, files[0], name=None).duplicates == 2
        assert [note for _, note, _ in said(other, "one")] == ["mine", None]


def test_labels_change_no_draw_and_no_hash(tmp_path: Path) -> None:
    drawn = []
    for name in ("plain", "labelled"):
        with closing(new_store(tmp_path / f"{name}.sqlite")) as store:
            iterate(store, 1)
            if name == "labelled":
                ids = [row["id"] for row in questions.page(store)["rows"]]
                store.labels.add(ids[::2], "good", "a note")
            rows = draw(store, 2, 3)
            drawn.append([(row.trajectory.record, row.draw) for row in rows])
            assert store.verify().corrupt == {}
    assert drawn[0] == drawn[1]
