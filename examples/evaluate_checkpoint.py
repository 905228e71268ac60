"""Train in two parts, then compare checkpoints by tag: python examples/evaluate_checkpoint.py [folder]."""

import sys
import tempfile

import srl


def main() -> None:
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    experiment = srl.Experiment(
        env=srl.envs.gym("CartPole-v1"),
        algorithm=srl.PPO(lr=1e-3, horizon=64),
        actors=srl.Actors(envs=16),
        launcher="inline",
    )
    experiment.run(out, steps=2_000)
    early = srl.evaluate(out, tag="latest", episodes=10)
    srl.resume(out, steps=16_000)

    # A tag is "latest", "best", or "v" and a version. Untagged versions are kept until a few newer ones exist.
    for tag in (f"v{early.version}", "best", "latest"):
        found = srl.evaluate(out, tag=tag, episodes=10)
        print(f"{tag}: version {found.version}, return {found.return_mean:.1f}")


if __name__ == "__main__":
    main()
