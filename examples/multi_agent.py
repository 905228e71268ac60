"""Two policies that learn against each other, three chasers and a runner: python examples/multi_agent.py [folder]."""

import sys
import tempfile

import srl


def main() -> None:
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="srl-")
    ppo = srl.PPO(lr=1e-3, horizon=25, minibatch=200)
    experiment = srl.Experiment(
        env=srl.envs.pettingzoo("mpe2.simple_tag_v3", max_cycles=25),
        algorithm={"chasers": ppo, "runner": ppo},
        agents={"adversary_*": "chasers", "*": "runner"},  # pattern of the agent's name: its policy
        actors=srl.Actors(envs=8),
        launcher="inline",
    )
    result = experiment.run(out, steps=4_000)
    for policy in ("chasers", "runner"):
        found = srl.evaluate(result.run_dir, policy=policy, episodes=10)
        print(f"{policy}: return {found.return_mean:.1f} over {found.episodes} agents' episodes")


if __name__ == "__main__":
    main()
