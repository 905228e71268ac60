"""Atari's games as ALE's own vector shows them, to the bit, but sooner.

ALE steps all copies in C++, and a quarter of its time goes into what comes after the emulator: two screens of four are
made grey, pixel by pixel, whether they have changed or not, made one, made smaller, copied four times, and handed from
thread to thread. Here emulators are stepped one by one from Python, which costs little beside as much emulation, and
the rest is done in C, for rows of pixels that have changed (ADR 23).
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from srl.core import native
from srl.core.specs import Array

Vector = VectorEnv[Any, Any, Any]
_CRUMB = 1e-3
_UNKNOWN = 256
_COUNTS = ("frameskip", "img_height", "img_width", "stack_num")
_DEFAULTS: dict[str, Any] = {
    "frameskip": 4,
    "max_num_frames_per_episode": 108_000,
    "repeat_action_probability": 0.0,
    "full_action_space": False,
    "img_height": 84,
    "img_width": 84,
    "stack_num": 4,
    "maxpool": True,
    "noop_max": 30,
    "episodic_life": False,
    "life_loss_info": False,
    "reward_clipping": True,
    "use_fire_reset": True,
}
"""Options of ALE's vector that are known here, and what they are by themselves; with any other one it is ALE's."""


_TOLD = {"lives": "lives", "frame_number": "getFrameNumber", "episode_frame_number": "getEpisodeFrameNumber"}
"""What ALE's vector has in its ``info``, and which method of an emulator says it."""


def vector(id: str, copies: int, kwargs: dict[str, Any]) -> Vector:
    """So many copies of the game, in the fastest way there is here."""
    given = {**gymnasium.spec(id).kwargs, **kwargs}
    options = {name: value for name, value in given.items() if name not in ("game", "num_threads", "grayscale")}
    plain = (
        given.get("num_threads", 1) == 1 and given.get("grayscale", True) is True and options.keys() <= _DEFAULTS.keys()
    )
    options = {**_DEFAULTS, **options}
    plain = plain and all(type(options[name]) is int and options[name] > 0 for name in _COUNTS)
    if native.library() is not None and plain:
        first = emulator(given["game"], options)
        pairs = list(zip((options["img_height"], options["img_width"]), first.getScreenDims(), strict=True))
        # Where both sides shrink by whole numbers, or one grows, OpenCV rounds in another way.
        if all(own < full for own, full in pairs) and any(full % own for own, full in pairs):
            return Games(given["game"], first, copies, options)
    return gymnasium.make_vec(id, num_envs=copies, **{"num_threads": 1, **kwargs})


def emulator(game: str, options: dict[str, Any], seed: int | None = None) -> Any:
    """An emulator of the game."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    made = ale_py.ALEInterface()
    made.setFloat("repeat_action_probability", options["repeat_action_probability"])
    if seed is not None:
        made.setInt("random_seed", seed)
    rom = ale_py.roms.get_rom_path(game)
    assert rom is not None, game
    made.loadROM(rom)
    return made


class _Books(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("high", "wide")),
        *((name, c_int64) for name in ("copies", "deep", "two")),
        ("screen", c_void_p),
        *((name, c_void_p * 2) for name in ("colours", "greys")),
        *((name, c_void_p) for name in ("seen", "small", "palette", "changed", "all", "fresh", "cut")),
    )


class Games(VectorEnv[Any, Any, Any]):
    """Emulators of one game in this thread; see the module.

    What a step returns is ``out``, if that is set before it, else good until the step after the next.
    """

    out: Array | None = None
    """Where the next step's observations go, if there."""

    def __init__(self, game: str, first: Any, copies: int, options: dict[str, Any]) -> None:
        """``first`` is one of the emulators."""
        self.game, self.options, self.num_envs, self.copies = game, options, copies, range(copies)
        self.emulators = [first, *(None for _ in range(1, copies))]
        self.actions = first.getLegalActionSet() if options["full_action_space"] else first.getMinimalActionSet()
        kinds = type(self.actions[0])
        self.noop, self.fire = kinds.NOOP, kinds.FIRE
        self.fires = options["use_fire_reset"] and self.fire in self.actions
        screen, size = first.getScreenDims(), (options["img_height"], options["img_width"])
        self.single_observation_space = Box(0, 255, (options["stack_num"], *size), np.uint8)
        self.single_action_space = Discrete(len(self.actions))
        self.observation_space = batch_space(self.single_observation_space, copies)
        self.action_space = batch_space(self.single_action_space, copies)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.luck = [np.random.RandomState() for _ in self.copies]
        self.elapsed, self.lives, self.over = [0] * copies, [0] * copies, [False] * copies
        self.reward: Array = np.zeros(copies, np.int32)
        self.terminated, self.truncated = np.zeros((2, copies), bool)
        shape = copies, *self.single_observation_space.shape
        self.small, self.stacks, self.spare = (np.zeros(shape, np.uint8) for _ in range(3))
        self.screen = np.zeros(screen, np.uint8)
        self.palette = np.full(256, _UNKNOWN, np.uint16)
        self.sides = [Side(full, own) for full, own in zip(screen, size, strict=True)]
        self.kept = [np.zeros((copies, *screen), np.uint8) for _ in range(5)]
        self.changed = np.zeros((copies, screen[0]), np.uint8)
        self.all, self.fresh, self.cut = np.zeros((3, copies), np.uint8)
        self.books = _Books(
            *map(ctypes.addressof, self.sides),
            copies,
            options["stack_num"],
            bool(options["maxpool"]),
            self.screen.ctypes.data,
            *((c_void_p * 2)(*(each.ctypes.data for each in pair)) for pair in (self.kept[:2], self.kept[2:4])),
            *(each.ctypes.data for each in (self.kept[4], self.small, self.palette, self.changed)),
            *(each.ctypes.data for each in (self.all, self.fresh, self.cut)),
        )
        library: Any = native.library()
        self.take, self.stack = library.screens_take, library.screens_stack
        self.take.argtypes, self.take.restype = [c_void_p, c_int64, c_int64], c_int
        self.stack.argtypes, self.stack.restype = [c_void_p, c_int64, c_void_p], None
        self.here = ctypes.addressof(self.books)
        self.at = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """See :class:`gymnasium.vector.VectorEnv`."""
        for copy in self.copies:
            own = None if seed is None else seed + copy
            if own is not None:
                self.luck[copy] = np.random.RandomState(own)
            if own is not None or self.emulators[copy] is None:
                self.emulators[copy] = emulator(self.game, self.options, own)
            self._begin(copy)
        return self._stacked(), Info(self)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """See :class:`gymnasium.vector.VectorEnv`."""
        for copy, action in enumerate(actions.tolist()):
            if self.over[copy]:
                self._begin(copy)
            else:
                self._step(copy, self.actions[action])
        return self._stacked(), self.reward, self.terminated, self.truncated, Info(self)

    def _step(self, copy: int, action: Any) -> None:
        ale, options = self.emulators[copy], self.options
        act, over, lives = ale.act, ale.game_over, self.lives[copy]
        reward, elapsed, most = 0, self.elapsed[copy], options["max_num_frames_per_episode"]
        ends, tells, lost = options["episodic_life"], options["episodic_life"] or options["life_loss_info"], False
        for left in range(options["frameskip"] - 1, -1, -1):
            reward += act(action)
            elapsed += 1
            gone = over()
            lost = tells and 0 < ale.lives() < lives
            if gone or elapsed >= most or (lost and ends):
                self.over[copy], self.cut[copy] = True, 1
                break
            if left < 2:
                ale.getScreen(self.screen)
                if self.take(self.here, copy, left):
                    self._learn(copy, left)
        self.elapsed[copy] = elapsed
        if tells:
            self.lives[copy] = ale.lives()
        self.reward[copy] = max(-1, min(1, reward)) if options["reward_clipping"] else reward
        self.terminated[copy] = gone or lost
        self.truncated[copy] = elapsed >= most and not (gone or lost)

    def _begin(self, copy: int) -> None:
        """A new episode."""
        ale = self.emulators[copy]
        ale.reset_game()
        if self.fires:
            ale.act(self.fire)
        for _ in range(self._below(copy, max(self.options["noop_max"], 1)) - self.fires):
            ale.act(self.noop)
            if ale.game_over():
                ale.reset_game()
        self.all[copy], self.fresh[copy], self.kept[3][copy] = 3, 1, 0
        ale.getScreen(self.screen)
        if self.take(self.here, copy, 0):
            self._learn(copy, 0)
        self.elapsed[copy], self.lives[copy], self.over[copy] = 0, ale.lives(), False
        self.reward[copy] = self.terminated[copy] = self.truncated[copy] = 0

    def _below(self, copy: int, bound: int) -> int:
        """A number from 0 on below ``bound``, as C++'s libraries draw it from a Mersenne twister (Lemire 2019)."""
        while True:
            high, low = divmod(int(self.luck[copy].randint(0, 2**32, dtype=np.uint32)) * bound, 2**32)
            if low >= bound or low >= 2**32 % bound:
                return high

    def _learn(self, copy: int, which: int) -> None:
        """Colours that were not known; ALE knows their grey."""
        self.palette[self.screen] = self.emulators[copy].getScreenGrayscale().reshape(self.screen.shape)
        self.take(self.here, copy, which)

    def _stacked(self) -> Array:
        self.at, out, self.out = (self.at + 1) % self.options["stack_num"], self.out, None
        if out is None or not out.flags.c_contiguous:
            self.stacks, self.spare = self.spare, self.stacks
            out = self.stacks
        self.stack(self.here, self.at, out.ctypes.data)
        self.fresh[:] = self.cut[:] = 0
        return out


class Info(dict[str, Any]):
    """What ALE says beside a step, looked up when it is asked for, until the next step."""

    def __init__(self, games: Games) -> None:
        super().__init__(dict.fromkeys(("env_id", *_TOLD)))
        self.games = games

    def __getitem__(self, name: str) -> Any:
        if name == "env_id":
            return np.arange(self.games.num_envs, dtype=np.int32)
        method = _TOLD[name]
        return np.array([getattr(each, method)() for each in self.games.emulators], np.int32)


class Side(ctypes.Structure):
    """How a side of ``full`` pixels becomes one of ``own``: each is the sum of a few, weighed as OpenCV does it."""

    _fields_ = (("full", c_int64), ("own", c_int64), ("taps", c_int64), ("first", c_void_p), ("weight", c_void_p))

    def __init__(self, full: int, own: int) -> None:
        scale = 1 / (own / full)
        shares = [_shares(at * scale, at * scale + scale, full) for at in range(own)]
        taps = max(max(each) - min(each) + 1 for each in shares)
        self.firsts = np.array([min(*each, full - taps) for each in shares], np.int32)
        self.weights = np.zeros((taps, own), np.float32)
        for at, each in enumerate(shares):
            for pixel, weight in each.items():
                self.weights[pixel - self.firsts[at], at] = weight
        super().__init__(full, own, taps, self.firsts.ctypes.data, self.weights.ctypes.data)


def _shares(begin: float, end: float, full: int) -> dict[int, float]:
    """What each pixel counts from ``begin`` to ``end``; crumbs do not."""
    width = min(end - begin, full - begin)
    last = min(math.floor(end), full - 1)
    first = min(math.ceil(begin), last)
    found = dict.fromkeys(range(first, last), 1 / width)
    if first - begin > _CRUMB:
        found[first - 1] = (first - begin) / width
    if end - last > _CRUMB:
        found[last] = min(end - last, 1.0, width) / width
    return found
