"""Actors that join and leave while a run goes on."""

from __future__ import annotations

from running import eventually, group_of
from srl.monitor.sinks import read_metrics


def test_actors_join_and_leave_a_run(tmp_path, srl_command, trained_some):
    run_dir = tmp_path / "run"
    few = ["--actors", "1", "--actors.most", "3", "--actors.envs", "16", "--steps", 10**8]
    command = srl_command("train", "cartpole", "--out", run_dir, *few)
    trained_some(run_dir)
    alone = len(group_of(command.pid))

    def scale(actors, expected):
        code, _, err = srl_command("scale", run_dir, "--actors", actors).finish()
        assert code == expected, err
        return err

    def goes_on():
        steps = read_metrics(run_dir)[-1]["steps"]
        trained_some(run_dir, steps + 10_000)

    assert "1 to 3 actors" in scale(4, 2)
    scale(3, 0)
    eventually(lambda: len(group_of(command.pid)) == alone + 2, 30, "two more actors")
    goes_on()
    scale(1, 0)
    eventually(lambda: len(group_of(command.pid)) == alone, 30, "one actor again")
    goes_on()
    command.process.terminate()
    code, out, err = command.finish()
    assert code == 130, err
    said = out + err
    assert all(f"actor-{number} {what}" in said for number in (1, 2) for what in ("joins", "leaves")), said
