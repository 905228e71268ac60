"""Tic-tac-toe against earlier versions of oneself: python examples/self_play.py [folder]."""

import json
import sys
import tempfile

import srl


def main() -> None:
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    experiment = srl.Experiment(
        # Each episode deals the two seats to "learner" and "opponent" at random, so both learn to begin and to follow.
        env=srl.envs.pettingzoo("pettingzoo.classic.tictactoe_v3", roles=("learner", "opponent")),
        algorithm={"learner": srl.PPO(lr=2e-3, horizon=32, minibatch=128, entropy=0.01)},
        agents={"learner": "learner", "opponent": "past"},
        opponents={"past": srl.Opponent(of="learner", rule="uniform")},
        actors=srl.Actors(envs=16),
        trainer=srl.Trainer(past_every=10),  # updates between two versions that opponents may play
        launcher="inline",
    )
    result = experiment.run(out, steps=8_000)

    # opponents.json: games and mean return of every version that played, from the opponent's side.
    played = json.loads((result.run_dir / "opponents.json").read_text())["past"]
    oldest = min(played, key=lambda version: int(version[1:]))
    print(f"{len(played)} versions played; the first one's mean return is {played[oldest]['return_mean']:.2f}")
    found = srl.evaluate(result.run_dir, versus=oldest, sample=True, episodes=100)
    print(f"against it now: {found.return_mean:.2f}")


if __name__ == "__main__":
    main()
