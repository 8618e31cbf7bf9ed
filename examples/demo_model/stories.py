"""Short stories from templates: a week in the life of an animal, told a day at a time.

Every free choice leans towards one option that depends on the hero. So greedy decoding tells each hero's own story, and
sampling tells variations of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import TypeVar

T = TypeVar("T")

HEROES: dict[str, tuple[str, ...]] = {
    "bear": ("Bruno", "Bella"),
    "beaver": ("Benny", "Willa"),
    "cat": ("Coco", "Milo"),
    "crow": ("Corin", "Jet"),
    "deer": ("Daisy", "Alder"),
    "dog": ("Rex", "Poppy"),
    "donkey": ("Dusty", "Olive"),
    "dragon": ("Ember", "Drake"),
    "duck": ("Dora", "Puddle"),
    "fox": ("Felix", "Rusty"),
    "frog": ("Fern", "Hopper"),
    "goat": ("Gus", "Greta"),
    "hedgehog": ("Hazel", "Bramble"),
    "horse": ("Star", "Juno"),
    "lion": ("Leo", "Nala"),
    "mouse": ("Mina", "Pip"),
    "otter": ("Otto", "River"),
    "owl": ("Oona", "Oscar"),
    "penguin": ("Penny", "Pablo"),
    "rabbit": ("Robin", "Clover"),
    "robot": ("Bolt", "Zed"),
    "snail": ("Sam", "Shelly"),
    "squirrel": ("Nutmeg", "Skip"),
    "tiger": ("Tara", "Toby"),
    "turtle": ("Tilly", "Theo"),
    "wolf": ("Wanda", "Ash"),
}
PLACES = ("forest", "valley", "village", "garden", "meadow", "harbor", "castle", "desert")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_TRAITS = ("small", "brave", "quiet", "clever", "kind", "curious")
_THINGS = ("a golden key", "a silver bell", "an old map", "a red lantern", "a blue stone", "a music box")
_FEELINGS = ("happy", "proud", "surprised", "calm", "hopeful")
_WEATHER = ("the sun was warm", "the rain fell softly", "the wind was cold", "the sky was clear", "fog lay everywhere")

_OPENINGS = (
    "Once upon a time a {trait} {hero} named {name} lived in a {place}.",
    "In a {place} far away there lived a {trait} {hero} named {name}.",
    "This is the story of {name}, a {trait} {hero} who lived in a {place}.",
)
_SCENES = (
    "{name} found {thing} under a tree and was very {feeling}.",
    "{name} met {friend} the {other}, and they shared bread and honey.",
    "{name} and {friend} walked to the river and counted the boats.",
    "{name} asked {friend} about {thing}, but {friend} only smiled.",
    "{name} could not sleep, so {friend} the {other} sang a song.",
    "{name} climbed the highest hill and looked over the whole {place}.",
    "{name} lost {thing}, and {friend} helped to look for it.",
    "{name} built a little house of wood and felt {feeling}.",
    "{name} showed {thing} to everyone in the {place}.",
    "{name} made soup for {friend}, and it tasted of summer.",
)
_ASIDES = (
    'The {hero} said, "What a day!"',
    "That morning {weather}.",
    "By evening {weather}, and {name} was {feeling}.",
    '"Thank you, {name}," said {friend} the {other}.',
    "Nobody in the {place} had ever seen such a thing.",
)
_CLOSINGS = (
    "And so {name} the {hero} and {friend} the {other} stayed friends for ever. The end.",
    "From then on {name} kept {thing} in a safe place. The end.",
    "And everyone in the {place} still talks about {name} the {hero}. The end.",
)


@dataclass(frozen=True, slots=True)
class StoryRequest:
    """A request for a story. `days` is how many days of the week it covers: 2 short, 5 normal, 7 long."""

    hero: str
    place: str | None
    days: int


def draw_request(rng: Random) -> StoryRequest:
    place = rng.choice(PLACES) if rng.random() < 0.4 else None
    return StoryRequest(rng.choice(tuple(HEROES)), place, rng.choice((2, 5, 5, 7)))


def question(request: StoryRequest, rng: Random) -> str:
    """Returns one of the ways to ask for this story."""
    length = {2: "short ", 5: "", 7: "long "}[request.days]
    article = "an" if request.hero[0] in "aeiou" else "a"
    about = f"about {article} {request.hero}"
    where = f" in a {request.place}" if request.place else ""
    verb = rng.choice(("Tell me", "Tell me", "Tell me", "Write", "Please tell me", "tell me"))
    return f"{verb} a {length}story {about}{where}{rng.choice(('.', '.', '.', ''))}"


def tell(request: StoryRequest, rng: Random) -> str:
    """Tells the story, in about 100 (2 days), 210 (5 days) or 280 (7 days) tokens."""
    choose = _Chooser(request, rng)
    slots = _cast(request, choose)
    sentences = [choose.among("opening", _OPENINGS)]
    previous = ""
    for day in DAYS[: request.days]:
        previous = choose.among(day, tuple(scene for scene in _SCENES if scene != previous))
        sentences.append(f"On {day} {previous}")
        if choose.among(day + " pause", (True, True, False)):
            sentences.append(choose.among(day + " aside", _ASIDES))
    sentences.append(choose.among("closing", _CLOSINGS))
    return " ".join(sentences).format(**slots)


class _Chooser:
    """Picks the hero's preferred option three times in four, and any option otherwise."""

    def __init__(self, request: StoryRequest, rng: Random) -> None:
        self._lean = f"{request.hero}|{request.place}"
        self._rng = rng

    def among(self, slot: str, options: tuple[T, ...]) -> T:
        if self._rng.random() < 0.25:
            return self._rng.choice(options)
        digest = blake2b(f"{self._lean}|{slot}".encode(), digest_size=4).digest()
        return options[int.from_bytes(digest, "big") % len(options)]


def _cast(request: StoryRequest, choose: _Chooser) -> dict[str, str]:
    others = tuple(hero for hero in HEROES if hero != request.hero)
    other = choose.among("other", others)
    return {
        "hero": request.hero,
        "name": choose.among("name", HEROES[request.hero]),
        "place": request.place or choose.among("place", PLACES),
        "trait": choose.among("trait", _TRAITS),
        "thing": choose.among("thing", _THINGS),
        "feeling": choose.among("feeling", _FEELINGS),
        "weather": choose.among("weather", _WEATHER),
        "other": other,
        "friend": choose.among("friend", HEROES[other]),
    }
