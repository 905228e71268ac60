"""Ray's part of ``srl bench streams``: the same messages through Ray's object store and actor calls.

    srl bench streams --ray PYTHON      # an interpreter with ray and numpy, and nothing of ours

Reads what to measure from stdin and prints the numbers as one line of JSON. Blocks and weights go by ``ray.put`` in one
actor and ``ray.get`` in another, which is told the reference by an actor call, with four such calls under way for
blocks and one for weights. A request for actions is an actor call with the observations as argument.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import ray

UNDER_WAY = 4
WIDTH = 32  # floats of an observation


@ray.remote(num_cpus=0)
class Consumer:
    """Gets what was put, or answers requests."""

    def __init__(self):
        self.answers = {}

    def get(self, refs):
        """When the object was there."""
        assert len(ray.get(refs[0]))
        return time.monotonic()

    def act(self, obs):
        rows = len(obs)
        if rows not in self.answers:
            self.answers[rows] = np.ones(rows, np.int64), np.ones(rows, np.float32), np.ones(rows, np.float32)
        return self.answers[rows]

    def processor(self):
        return time.process_time()


@ray.remote(num_cpus=0)
class Producer:
    """Puts blocks and weights, or asks for actions."""

    def __init__(self, consumer):
        self.consumer = consumer

    def _processor(self):
        return time.process_time(), ray.get(self.consumer.processor.remote())

    def send(self, nbytes, seconds):
        """GB/s and processor time a block."""
        block = {"obs": np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)}
        count = max(6, int(seconds / (nbytes / 2e9 + 1e-3)))
        self._send(block, UNDER_WAY)
        before, begin = self._processor(), time.perf_counter()
        self._send(block, count)
        elapsed = (time.perf_counter() - begin) / count
        ours, theirs = (np.subtract(self._processor(), before) / count * 1e6).tolist()
        return {"GB/s": nbytes / elapsed / 1e9, "sender_us": ours, "receiver_us": theirs}

    def _send(self, block, count):
        waiting = []
        for _ in range(count):
            if len(waiting) == UNDER_WAY:
                ray.get(waiting.pop(0))
            waiting.append(self.consumer.get.remote([ray.put(block)]))
        ray.get(waiting)

    def publish(self, nbytes, seconds):
        """Microseconds until weights are there."""
        arrays = {str(i): np.ones(nbytes // 32, np.float32) for i in range(8)}
        times, before = [], self._processor()
        for _ in range(max(3, min(20, int(seconds / (nbytes / 1e9 + 2e-3))))):
            begin = time.monotonic()
            times.append(ray.get(self.consumer.get.remote([ray.put(arrays)])) - begin)
        ours, theirs = (np.subtract(self._processor(), before) / len(times) * 1e6).tolist()
        return {"us": float(np.median(times)) * 1e6, "sender_us": ours, "receiver_us": theirs}

    def ask(self, rows, end):
        """Seconds of every round trip until ``end``, and processor time."""
        obs, found, before = np.ones((rows, WIDTH), np.float32), [], time.process_time()
        while (begin := time.monotonic()) < end:
            ray.get(self.consumer.act.remote(obs))
            found.append(time.monotonic() - begin)
        return found, time.process_time() - before


def round_trips(consumer, clients, rows, seconds):
    before = ray.get(consumer.processor.remote())
    end = time.monotonic() + seconds
    answers = ray.get([client.ask.remote(rows, end) for client in clients])
    times = np.concatenate([found for found, _ in answers]) * 1e6
    processor = ray.get(consumer.processor.remote()) - before + sum(used for _, used in answers)
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    rate = len(times) / seconds
    return {"p50_us": p50, "p99_us": p99, "requests/s": rate, "cpu_us": processor / len(times) * 1e6}


def main():
    order = json.load(sys.stdin)
    seconds, cases = order["seconds"], order["cases"]
    # Room for the largest blocks that are under way; freed objects are reused.
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False, object_store_memory=2 * 10**9)
    consumer = Consumer.remote()
    most = max([1, *(case["clients"] for case in cases.get("inference", ()))])
    producers = [Producer.remote(consumer) for _ in range(most)]
    ray.get([producer._processor.remote() for producer in producers])

    def measure(kind, case):
        if kind == "sample":
            return ray.get(producers[0].send.remote(case["bytes"], seconds))
        if kind == "parameters":
            return ray.get(producers[0].publish.remote(case["bytes"], seconds))
        return round_trips(consumer, producers[: case["clients"]], case["rows"], max(seconds, 0.2))

    found = {"version": ray.__version__}
    for kind, each in cases.items():
        found[kind] = []
        for case in each:
            measure(kind, case)
            rounds = [measure(kind, case) for _ in range(order["rounds"])]
            found[kind].append({name: [values[name] for values in rounds] for name in rounds[0]})
    ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
