"""Train PPO on CartPole for a few seconds and evaluate it: python examples/quickstart.py [folder]."""

import sys
import tempfile

import srl


def main() -> None:
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    experiment = srl.Experiment(
        env=srl.envs.gym("CartPole-v1"),
        algorithm=srl.PPO(lr=1e-3, horizon=64),
        actors=srl.Actors(count=1, envs=32),
    )
    result = experiment.run(out, steps=15_000)
    print(f"trained on {result.steps:,} steps in {result.seconds:.0f} s, see {result.run_dir}")

    found = srl.evaluate(result.run_dir, episodes=10)
    print(f"evaluation: return {found.return_mean:.1f} over {found.episodes} episodes")


if __name__ == "__main__":
    main()
