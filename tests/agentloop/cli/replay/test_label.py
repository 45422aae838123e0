import json

from replay.storage.databases import Location
from tests.fakes.records import RUN, iterated, sql
from tests.fakes.replay_command import ask


def test_rows_are_labelled_by_id_and_by_filter_and_listed(location: Location) -> None:
    iterated(location).close()
    ids = [row["id"] for row in json.loads(ask("ls", location, "--limit", "99", "--json").output)]
    assert ask("label", location).output == "no labels\n"
    answer = ask("label", location, ids[0][:6], ids[1], "--add", "good", "--note", "it's right", "--by", "ann")
    assert answer.output == "2 rows labelled good\n"
    dry = ask("label", location, "--where", "success", "--add", "won")
    assert dry.output == "9 rows would change\nnothing was changed; add --yes to do it\n"
    assert sql(location, "select count(*) from trajectory_labels") == [(2,)]
    done = ask("label", location, "--where", "success", "--add", "won", "--yes", "--json")
    assert json.loads(done.output) == {"label": "won", "on": "trajectory", "count": 9, "done": True}
    assert ask("label", location, "--run", RUN, "--add", "baseline").output == "1 run labelled baseline\n"
    counts = json.loads(ask("label", location, "--json").output)
    found = [(each["label"], each["trajectories"], each["runs"]) for each in counts]
    assert found == [("baseline", 0, 1), ("good", 2, 0), ("won", 9, 0)]
    listed = json.loads(ask("ls", location, "--where", "label == 'good' and 'right' in note", "--json").output)
    assert [row["id"] for row in listed] == ids[:2]
    assert "labels" in ask("ls", location).output.splitlines()[0]
    assert 'labelled    good, "it\'s right", by ann' in ask("show", ids[0], location).output
    assert ask("label", location, ids[0], "--remove", "good").output == "1 row no longer labelled good\n"
    assert "labelled    good" not in ask("show", ids[0], location).output


def test_what_is_not_said_clearly_is_refused_in_one_line(location: Location) -> None:
    iterated(location).close()
    for arguments, error in (
        (("x",), "must be given --add or --remove, got neither"),
        (("--add", "x"), "must be given one of ID..., --where and --run"),
        (("x", "--where", "success", "--add", "x"), "got none or several"),
        (("x", "--add", "x", "--remove", "y"), "got both"),
        (("nowhere", "--add", "x"), "which begins none"),
    ):
        answer = ask("label", location, *arguments)
        assert (answer.exit_code, error in answer.output, answer.output.count("\n")) == (2, True, 1), answer.output
