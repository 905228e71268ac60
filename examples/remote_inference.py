"""CartPole with the policy in a worker of its own: python examples/remote_inference.py [folder].

The actor steps two vectors in turn. While one waits for the policy worker's answer the other one steps.
"""

import sys
import tempfile

import srl


def main() -> None:
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    experiment = srl.Experiment(
        env=srl.envs.gym("CartPole-v1"),
        algorithm=srl.PPO(lr=1e-3, horizon=64),
        actors=srl.Actors(count=1, envs=16, ring=2, inference="remote"),
        policies=srl.Policies(count=1),
        steps=8_000,
    )
    result = experiment.run(out)
    workers = sorted(log.stem for log in (result.run_dir / "logs").glob("*.log"))
    print(f"workers: {', '.join(workers)}")

    found = srl.evaluate(result.run_dir, episodes=5)
    print(f"evaluation: return {found.return_mean:.1f} over {found.episodes} episodes")


if __name__ == "__main__":
    main()
