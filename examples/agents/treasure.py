"""A text game of 10 to 20 turns, the task of treasure.toml: find the key, then the chest, in the
dark.

Nine rooms hang together without circles. Each turn the player reads what is in the room and which
ways lead out, and answers with one command: `go east`, `take key`, `open chest`. The world follows
from a number in the reference, so that equal commands give equal games. The warm-up shows two
players: most games are played at random, some by a player that takes the key, opens the chest and
turns back only where no other way leads on. Reinforcement learning pays 1 for the open chest.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from rollstream.api import (
    Document,
    Reply,
    Score,
    TaskPrompt,
    TaskText,
    TrainedTokenizer,
    Turns,
)

VOCABULARY = 384
SIDE = 3
WAYS = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
HELD_OUT = 200
"""Games from this number on are trained; those before it are held out."""
CAREFUL = 0.25
"""Share of the warm-up's games with the careful player."""
TURNS_SHOWN = 20
"""Most commands of a game of the warm-up."""
WARM_UP = 1 << 40
"""Games from this number on are the warm-up's."""

Room = tuple[int, int]


@dataclass(frozen=True, slots=True)
class World:
    """Holds the ways out of each room, and the rooms of the key, the chest and the start."""

    ways: Mapping[Room, tuple[str, ...]]
    key: Room
    chest: Room
    start: Room


@dataclass(frozen=True, slots=True)
class Player:
    """Holds where the player is, and `came`, the way back to the room before."""

    room: Room
    came: str = ""
    has_key: bool = False
    is_done: bool = False


@lru_cache(maxsize=1024)
def world_of(number: int) -> World:
    """Returns the world of this number: a random tree of rooms, and three different rooms in it."""
    draw = random.Random(number)
    rooms = [(x, y) for y in range(SIDE) for x in range(SIDE)]
    ways: dict[Room, set[str]] = {room: set() for room in rooms}
    joined = [draw.choice(rooms)]
    while len(joined) < len(rooms):
        room, way = draw.choice(joined), draw.choice(list(WAYS))
        other = _behind(room, way)
        if other in ways and other not in joined:
            joined.append(other)
            ways[room].add(way)
            ways[other].add(_opposite(way))
    key, chest, start = draw.sample(rooms, 3)
    ordered = {room: tuple(way for way in WAYS if way in ways[room]) for room in rooms}
    return World(ordered, key, chest, start)


def play(world: World, player: Player, command: str) -> Player | None:
    """Returns the player after a command; None if the command is not possible."""
    verb, _, noun = command.partition(" ")
    if verb == "go" and noun in world.ways[player.room]:
        return replace(player, room=_behind(player.room, noun), came=_opposite(noun))
    if command == "take key" and player.room == world.key and not player.has_key:
        return replace(player, has_key=True)
    if command == "open chest" and player.room == world.chest and player.has_key:
        return replace(player, is_done=True)
    return None


def look(world: World, player: Player) -> str:
    """Returns what the player reads: things in the room, ways out, and the way it came by."""
    things = " key" if player.room == world.key and not player.has_key else ""
    things += " chest" if player.room == world.chest else ""
    back = f" back: {player.came}" if player.came else ""
    held = " You hold the key." if player.has_key else ""
    return f"here:{things or ' nothing'} ways: {' '.join(world.ways[player.room])}{back}{held}"


class Treasure:
    """Implements `Task`, `Teacher` and `Environment`. A game is lost after `turns` commands."""

    name = "treasure"

    def __init__(self, text: TaskText, turns: int = 20) -> None:
        if text.tokenizer.folder is None:  # only before the warm-up
            text = TaskText(TrainedTokenizer(_texts, VOCABULARY))
        self._text, self._turns = text, turns

    @property
    def stop(self) -> tuple[int, ...]:
        return self._text.stop

    def tokenizer(self):
        return self._text.tokenizer

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        return self._prompt(HELD_OUT + random.Random(f"{seed} {position}").randrange(1 << 32))

    def held_out(self, count: int) -> list[TaskPrompt]:
        return [self._prompt(number) for number in range(min(count, HELD_OUT))]

    def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Returns what the player reads after its last command; nothing after the last turn."""
        world, player = world_of(int(reference)), self._player(int(reference), turns[:-1])
        after = play(world, player, self._text.answer(turns))
        if (after and after.is_done) or (len(turns) + 1) // 2 >= self._turns:
            return Reply(())
        seen = look(world, after) if after else f"not possible. {look(world, player)}"
        return Reply(self._heard(seen))

    def judge(self, reference: str, turns: Turns) -> Score:
        """Returns 1 for the open chest, with the score `key` if the key was found."""
        player = self._player(int(reference), turns)
        return Score(float(player.is_done), {"key": float(player.has_key)})

    def documents(self, seed: int, count: int) -> list[Document]:
        """Returns whole games, played at random. The loss covers what the player reads, too."""
        draw = random.Random(seed)
        replies = lru_cache(maxsize=4096)(self._heard)
        made: list[Document] = []
        for _ in range(count):
            seen, *turns = _random_game(WARM_UP + draw.randrange(1 << 32), draw)
            answer: tuple[int, ...] = ()
            for index, text in enumerate(turns):
                answer += replies(text) if index % 2 else self._text.response(text)
            made.append(Document(self._text.prompt(seen), answer))
        return made

    def _heard(self, text: str) -> tuple[int, ...]:
        return self._text.reply([{"role": "user", "content": text}])

    def _prompt(self, number: int) -> TaskPrompt:
        world = world_of(number)
        seen = look(world, Player(world.start))
        return TaskPrompt(self._text.prompt(seen), str(number))

    def _player(self, number: int, turns: Turns) -> Player:
        """Returns the player after these turns; every second one is the environment's."""
        world = world_of(number)
        player = Player(world.start)
        for index in range(0, len(turns), 2):
            player = play(world, player, self._text.answer(turns[: index + 1])) or player
        return player


def _random_game(number: int, draw: random.Random) -> list[str]:
    """Returns what is read and commanded, in turn, up to a command, in a game of one of the two
    players.
    """
    world, is_careful = world_of(number), draw.random() < CAREFUL
    player = Player(world.start)
    texts = [look(world, player)]
    while True:
        commands = [*(f"go {way}" for way in WAYS), "take key", "open chest"]
        after = {command: play(world, player, command) for command in commands}
        possible = {command: then for command, then in after.items() if then}
        command = draw.choice(_careful(list(possible), player) if is_careful else list(possible))
        player = possible[command]
        texts.append(command)
        if player.is_done or len(texts) >= 2 * TURNS_SHOWN:
            return texts
        texts.append(look(world, player))


def _careful(possible: list[str], player: Player) -> list[str]:
    """Returns the commands among which the careful player chooses."""
    useful = [command for command in possible if not command.startswith("go ")]
    onward = [command for command in possible if command != f"go {player.came}"]
    return useful or onward or possible


def _texts() -> Iterator[str]:
    """Yields texts to train the tokenizer on: random games."""
    draw = random.Random(0)
    for number in range(400):
        yield "\n".join(_random_game(WARM_UP + number, draw))


def _behind(room: Room, way: str) -> Room:
    return room[0] + WAYS[way][0], room[1] + WAYS[way][1]


def _opposite(way: str) -> str:
    return list(WAYS)[(list(WAYS).index(way) + 2) % 4]
