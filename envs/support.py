"""support-v0: a shop's customer service, with rules, tools that write to a database, and a customer to talk to.

Task: a customer does not want an item any more. The rules in the system message say what to do about which order:
cancel it, wait, refund it or refuse; or flag it, if it is someone else's. The customer says the order's number and a
name only if asked for them, and ends the dialogue at the first message that is no question. `find_order` reads,
`cancel_order`, `refund_order` and `flag_order` write. Reward: `resolved` (weight 1) if the orders are exactly what the
rules want, the customer was asked for the name, heard the result in the rules' words, and learned nothing of orders
that are not theirs. Two of five kinds of orders stay as they are: their result has a number that only `find_order`
knows. Splits: `train`, `eval` and `dev` have other orders and customers, by a hash of their seed.
A script plays the customer; with `env_args.user=NAME`, and `env_args.user_args` for its settings, a policy does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agent_rl import seeds
from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.envs.quiz import draw_task, one_call
from agent_rl.gym.budget import Budget
from agent_rl.gym.dialogue import DialogueEnv, ScriptedUser
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import tool
from agent_rl.policy.user import model_user
from agent_rl.seeds import Stream

RULES = """Ask the customer for the order's number and the name. Then find the order.
- another name: flag it, tell nothing of it, say "flagged"
- open: cancel it, say "cancelled"
- sent: say "wait DAYS"
- delivered 30 days ago or less: refund its price, say "refunded PRICE"
- delivered earlier: say "refused DAYS\""""
DAYS = 30  # that a delivered order can be refunded
RESULTS = {"stranger": "flagged", "open": "cancelled", "sent": "wait", "delivered": "refunded", "late": "refused"}
"""The word that the customer hears, for each kind of order."""
KINDS = tuple(RESULTS)
WRITES = {"stranger": "flag_order", "open": "cancel_order", "delivered": "refund_order"}
NAMES = ("ada", "ben", "cleo", "dora", "emil", "finn", "gina", "hugo", "ines", "juri", "kaya", "leon")
ITEMS = ("chair", "lamp", "sofa", "desk", "stool", "shelf", "bed", "rug")
STATUS = ("open", "sent", "delivered")
ORDERS = 5  # in the database; one is the customer's
_WORD = re.compile(r"[a-z0-9]+")
_QUESTIONS = {"number": r"\bnumber\b[^?]*\?", "name": r"\bname\b[^?]*\?"}


@dataclass(slots=True)
class Order:
    """A row of the database; the tools write the status and the last two."""

    name: str
    item: str
    price: int
    status: str
    days: int
    refunded: int = 0
    flags: int = 0


def generate(seed: int, kind: str) -> tuple[dict[int, Order], int, str]:
    """Return the orders of a seed by number, the number of the one in question, and the customer's name."""
    rng = seeds.rng(Stream.WORLD, seed)
    numbers = rng.choice(np.arange(1000, 10_000), ORDERS, replace=False).tolist()
    names = rng.permutation(NAMES).tolist()
    items, prices = rng.choice(ITEMS, ORDERS).tolist(), rng.integers(100, 1000, ORDERS).tolist()
    status, days = rng.choice(STATUS, ORDERS).tolist(), rng.integers(1, 2 * DAYS, ORDERS).tolist()
    orders = dict(zip(numbers, map(Order, names, items, prices, status, days), strict=True))
    own = orders[numbers[0]]
    if kind != "stranger":
        own.status = "delivered" if kind == "late" else kind
    own.days = own.days % DAYS + 1 + DAYS * (kind == "late")
    return orders, numbers[0], names[-1] if kind == "stranger" else names[0]


def make_task(split: str, index: int) -> Task:
    """Draw a database of the split; the five kinds of orders take turns."""
    kind = KINDS[index % len(KINDS)]
    return draw_task(split, index, lambda rng: {"seed": int(rng.integers(2**48)), "kind": kind}, "seed")


@register("support-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=10, tool_calls=10))
class Support(DialogueEnv):
    """Serve a shop's customer by the rules."""

    snapshot_attributes = ("dialogue", "orders", "found")

    def __init__(self, user: str = "scripted", user_args: Mapping[str, JSON] | None = None) -> None:
        """Choose who plays the customer: the script, or a policy by its name and settings."""
        self.user_name, self.user_args = user, user_args or {}

    async def reset(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        """Generate the orders; the customer begins."""
        self.kind, self.found = str(task["kind"]), False
        self.orders, self.number, self.name = generate(int(str(task["seed"])), self.kind)
        self.wanted = copy.deepcopy(self.orders)
        own = self.wanted[self.number]
        own.status = "cancelled" if self.kind == "open" else own.status
        own.refunded, own.flags = own.price * (self.kind == "delivered"), int(self.kind == "stranger")
        wish = f"I do not want the {own.item} any more."
        if self.user_name == "scripted":
            facts = {_QUESTIONS["number"]: f"It is {self.number}.", _QUESTIONS["name"]: f"I am {self.name}."}
            self.user = ScriptedUser([wish], {**facts, rf"^(?!.*({'|'.join(facts)})).*\?": "I do not know."})
        else:
            instructions = (
                f'You are a customer of a shop. You want: "{wish}" Your order\'s number is {self.number} and your name '
                f"is {self.name}: say each only when asked for it. Say one short sentence at a time, and nothing you "
                "can't know from here. Once you hear a result that is no question, say ###STOP###."
            )
            self.user = model_user(self.user_name, self.user_args, instructions, "support-v0", int(rng.integers(2**31)))
        return await self.open_dialogue(RULES)

    @tool(inline=True)
    def find_order(self, number: int) -> str:
        """Say all that is known of an order."""
        order = self._order(number)
        self.found = self.found or number == self.number
        return ", ".join(f"{name} {getattr(order, name)}" for name in ("name", "item", "price", "status", "days"))

    @tool(inline=True)
    def cancel_order(self, number: int) -> str:
        """Cancel an order."""
        self._order(number).status = "cancelled"
        return "done"

    @tool(inline=True)
    def refund_order(self, number: int, amount: int) -> str:
        """Pay money back for an order."""
        self._order(number).refunded += amount
        return "done"

    @tool(inline=True)
    def flag_order(self, number: int) -> str:
        """Report that someone else asked for an order."""
        self._order(number).flags += 1
        return "done"

    def _order(self, number: int) -> Order:
        if number not in self.orders:
            raise ValueError(f"no order {number}")
        return self.orders[number]

    def _words(self, role: str, last: int = 0) -> list[str]:
        """Return the words of one side's messages, of the last ones or of all."""
        said = [m.content.lower() for m in self.dialogue if m.role == role]
        return _WORD.findall(" ".join(said[-last:]))

    def _gives_away(self) -> bool:
        """Whether something was said of an order that is none of the customer's business."""
        order = self.orders[self.number]
        secret = {each.name for each in self.orders.values()} - {self.name}
        secret |= {str(order.price), str(order.days)} if self.kind == "stranger" else set()
        return not secret.isdisjoint(self._words("assistant"))

    @reward
    def resolved(self, episode: Episode) -> bool:
        """Whether the database and the customer got what the rules want."""
        if self.orders != self.wanted or self._gives_away() or self.name not in self._words("user"):
            return False
        answer = self._words("assistant", last=1)
        others = {*RESULTS.values()} - {RESULTS[self.kind]}
        return f" {self._result(self.kind)} " in f" {' '.join(answer)} " and others.isdisjoint(answer)

    def state_hash(self) -> str:
        """Return what was heard, found, done and given away."""
        heard = sorted({m.content for m in self.dialogue if m.role == "user"})
        return repr((heard, self.orders, self.found, self._gives_away()))

    def oracle(self) -> Script:
        """Ask, find the order, and do what the rules say."""
        yield "Your order's number and your name?"
        yield one_call("find_order", number=self.number)
        yield from self._settle(self.kind)

    def _settle(self, kind: str) -> Script:
        """Do with the order what is right for a kind of it."""
        amount = {"amount": self.orders[self.number].price} if kind == "delivered" else {}
        if kind in WRITES:
            yield one_call(WRITES[kind], number=self.number, **amount)
        yield self._result(kind)

    def _result(self, kind: str) -> str:
        """Return what the customer has to hear."""
        order = self.orders[self.number]
        number = {"sent": order.days, "late": order.days, "delivered": order.price}.get(kind, "")
        return f"{RESULTS[kind]} {number}".strip()

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Ask, sometimes only for the number; find the order; do what is right, or anything, in the right form."""
        yield "Your order's number?" if rng.random() < 0.2 else "Your order's number and your name?"
        if rng.random() < 0.1:
            yield one_call("find_order", order=self.number)
        yield one_call("find_order", number=self.number)
        yield from self._settle(self.kind if rng.random() < 0.5 else str(rng.choice(KINDS)))
