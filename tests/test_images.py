"""Images in C against torch's own convolutions."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch

from srl.algorithms.adam import Adam
from srl.core import native
from srl.policies.images import features, interleaved
from srl.policies.networks import Across, NatureCNN

SHAPES = [(4, 84, 84), (1, 36, 40), (3, 39, 53), (12, 36, 64), (16, 36, 36)]
compiled = pytest.mark.skipif(native.library() is None, reason="there was no compiler")


def game(rows: int, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Images with a background, the same everywhere but for a border, and a few things that move."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.full((rows, *shape), 87, dtype=torch.uint8)
    images[:, :, :3] = torch.randint(0, 256, (3, shape[2]), generator=generator, dtype=torch.uint8)
    for image in images:
        for plane in image:
            y, x = (int(torch.randint(0, side - 4, (), generator=generator)) for side in shape[1:])
            plane[y : y + 3, x : x + 2] = int(torch.randint(0, 256, (), generator=generator))
    return images


def plain(network: NatureCNN, monkeypatch: pytest.MonkeyPatch) -> NatureCNN:
    """A copy that has torch do it."""
    other = copy.deepcopy(network)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr("srl.policies.networks.features", lambda *_: None)
            return NatureCNN.forward(other, x)

    monkeypatch.setattr(other, "forward", forward)
    return other


@pytest.fixture(params=[16, 8, 4])
def lanes(request):
    """With vectors of so many numbers: those of processors that are not here, too."""
    library = native.library()
    try:
        library.products_limit(request.param)
        if library.products_lanes() != request.param:
            pytest.skip(f"this processor's vectors do not hold {request.param} numbers")
        yield request.param
    finally:
        library.products_limit(16)


def layers(network: NatureCNN) -> tuple[list[torch.nn.Conv2d], Across]:
    return [each for each in network.modules() if isinstance(each, torch.nn.Conv2d)], network.dense


@compiled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_repeated_windows_are_convolved_once_with_the_same_result(shape, rows, lanes, monkeypatch):
    torch.manual_seed(1)
    network, x = NatureCNN(shape), game(rows, shape)
    other = plain(network, monkeypatch)
    assert features(x, *layers(network)) is not None
    wanted = torch.randn(rows, network.out_features)
    found, expected = network(x), other(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for each in (found, expected):
        (each * wanted).sum().backward()
    for (name, weight), twin in zip(network.named_parameters(), other.parameters(), strict=True):
        longest = float(twin.grad.abs().max())
        assert longest > 0, name
        torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-3, atol=1e-5 * longest, msg=name)


@compiled
def test_vectors_of_half_the_width_take_no_more_than_four_times_as_long():
    """Vectors that are wider than the processor's are taken apart through memory, ten times as slowly."""
    library = native.library()
    if library.products_lanes() < 16:
        pytest.skip("this processor has no AVX-512")
    torch.manual_seed(1)
    network, x, took = NatureCNN((4, 84, 84)), game(40, (4, 84, 84)), {}
    try:
        for _ in range(7):
            for lanes in (16, 8):
                library.products_limit(lanes)
                begin = time.perf_counter()
                network(x).sum().backward()
                took[lanes] = min(took.get(lanes, 1e9), time.perf_counter() - begin)
    finally:
        library.products_limit(16)
    assert took[8] < 4 * took[16]


@compiled
def test_threads_change_nothing_to_the_bit():
    torch.manual_seed(1)
    network, x = NatureCNN((4, 84, 84)), game(60, (4, 84, 84))
    optimizer, wanted = Adam(network, 0.01), torch.randn(60, network.out_features)
    weights, before, found = optimizer.flat.clone(), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            optimizer.flat.copy_(weights)
            optimizer.steps.zero_()
            for each in (optimizer.grad, *optimizer.moments):
                each.zero_()
            seen = network(x)
            (seen * wanted).sum().backward()
            length = optimizer.clip(0.5)
            optimizer.step()
            found.append((seen.detach(), optimizer.grad.clone(), optimizer.flat.clone(), torch.tensor(length)))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert one.abs().sum() > 0 and torch.equal(one, other)


@compiled
def test_gradients_are_added_to_what_is_there(monkeypatch):
    torch.manual_seed(1)
    network, x = NatureCNN((4, 84, 84)), game(9, (4, 84, 84))
    network(x).square().sum().backward()
    once = [weight.grad.clone() for weight in network.parameters()]
    gathered = network.dense.weight.grad
    network(x).square().sum().backward()
    assert network.dense.weight.grad is gathered
    for weight, grad in zip(network.parameters(), once, strict=True):
        torch.testing.assert_close(weight.grad, 2 * grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


@compiled
def test_windows_that_differ_in_a_single_bit_are_not_taken_for_equal():
    torch.manual_seed(2)
    network = NatureCNN((4, 84, 84))
    network.first.weight.data.mul_(50)  # so that a bit can be seen
    images = torch.full((65, 4, 84, 84), 128, dtype=torch.uint8)
    for number in range(64):  # a bit of each place of a block, in channels by turns
        images[number + 1, number % 4, 40 + number // 16 % 4, 40 + number // 4 % 4] += 1
    with torch.no_grad():
        found = features(images, *layers(network))
    assert found is not None
    for image in found[1:]:
        assert not torch.equal(image, found[0])


@compiled
@pytest.mark.parametrize("case", ["noise", "strided", "float", "deep", "reduced", "uncompiled"])
def test_what_does_not_repeat_or_cannot_be_compared_goes_through_convolutions(case, monkeypatch):
    shape = (17, 36, 36) if case == "deep" else (4, 48, 48)
    network, x = NatureCNN(shape), game(16, shape)
    if case == "noise":
        x = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    x = x[::2] if case == "strided" else x
    x = x.float() if case == "float" else x
    if case == "uncompiled":
        monkeypatch.setattr("srl.core.native.library", lambda: None)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "reduced"):
        assert features(x, *layers(network)) is None
        found = network(x)
    rough = case == "reduced"
    torch.testing.assert_close(
        found.float(),
        plain(network, monkeypatch)(x),
        rtol=0.1 if rough else 1e-4,
        atol=0.1 if rough else 1e-5,
    )


@compiled
def test_threads_do_not_disturb_each_other():
    network = NatureCNN((4, 84, 84))
    batches = [game(rows, (4, 84, 84), rows) for rows in (1, 8, 16, 33)]
    with torch.no_grad():
        alone = [network(x) for x in batches]
        wrong: list[int] = []

        def work(number: int) -> None:
            with torch.no_grad():
                for _ in range(20):
                    if not torch.allclose(network(batches[number]), alone[number], atol=1e-6):
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("shape", [(8, 4, 84, 84), (3, 1, 36, 40), (2, 3, 37, 41), (2, 4, 5, 7), (1, 12, 36, 36)])
@pytest.mark.parametrize("way", ["contiguous", "strided", "float", "uncompiled"])
def test_images_are_interleaved_as_torch_does_it(shape, way, monkeypatch):
    x = torch.randint(0, 256, (2 * shape[0], *shape[1:]), dtype=torch.uint8)
    x = x[::2] if way == "strided" else x[: shape[0]]
    x = x.float() if way == "float" else x
    if way == "uncompiled":
        monkeypatch.setattr("srl.core.native.library", lambda: None)
    found = interleaved(x)
    assert torch.equal(found, x.float())
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_a_network_for_images_can_be_exported():
    network, x = NatureCNN((4, 84, 84)), torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    traced = torch.export.export(network, (x,), strict=True)  # as srl.export does
    torch.testing.assert_close(traced.module()(x), network(x))


@pytest.mark.parametrize("shape", [(4, 84, 84), (3, 39, 53)])
def test_channels_may_come_last(shape):
    first, last = NatureCNN(shape), NatureCNN((*shape[1:], shape[0]))
    last.load_state_dict(first.state_dict())
    images = game(5, shape)
    torch.testing.assert_close(last(images.movedim(1, -1).contiguous()), first(images))


def test_small_images_are_vectors():
    from gymnasium import spaces

    from srl.policies.networks import Encoder

    encoder = Encoder(spaces.Box(0, 255, (7, 7, 3), "uint8"), (8,), "tanh", normalize=False, twins=False)
    assert not encoder.images
    assert encoder({"obs": torch.ones(2, 7, 7, 3, dtype=torch.uint8)}).shape == (2, 8)
