"""The shop's service desk: rules to keep, a database to change, and a customer who says one thing after the other.

A success is a conversation after which the database is as it must be, and in which the customer was told all that
matters. The tools do what they are asked: whether the rules allow it is for the policy to know.
"""

import copy
import re
from dataclasses import dataclass
from typing import Literal

from agentloop import Environment, Message, ScriptedUser, SimulatedUser, Task, ToolCall, tool

RULES = """You work at the service desk of a shop. These are its rules:
- First ask for the customer number and the postcode, and find the customer. Do nothing for a customer who is not found.
- Look an order up before you speak of it or change it.
- A packed order can be cancelled, or sent to another street. If it is cancelled, the customer gets the price back.
- A sent order can't be changed any more. Say in how many days it arrives.
- A delivered order can be returned for 30 days. The customer gets the price less 5 euros back.
- An older order can't be returned. Say how many days ago it was delivered.
- Change nothing that the customer did not ask for. Say what you did, with the amount in euros or the new street."""
ARTICLES = ("kettle", "lamp", "tent", "mirror", "carpet", "ladder", "bucket", "pillow", "basket", "torch")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
STREETS = ("Mill Lane", "Station Road", "High Street", "Park Avenue", "Church Street", "Garden Walk")
NAMES = ("Ada Berg", "Ben Ode", "Cleo Hart", "Dan Ivers", "Eva Lund", "Finn Moss")
SENT, PACKED, DAYS = "sent", "packed", "{days} days"


@dataclass(frozen=True)
class Case:
    """A wish about an order in some state, and what the rules make of it. Braces hold facts of the order."""

    wish: str
    status: str
    days: tuple[int, int]
    """The fewest and the most days until the order arrives, or since it was delivered."""
    reply: str
    fact: str
    """The part of the reply that the customer must be told."""
    change: dict[str, str]
    """What the database must hold in the end; empty: the rules forbid what the customer wants."""


CASES = (
    Case("Please cancel my order of the {article}.", PACKED, (2, 5), "It is cancelled. You get {price} euros back.",
         "{price} euros", {"status": "cancelled"}),
    Case("I don't need the {article}. Can you cancel it?", SENT, (2, 5), "No, it was sent. It arrives in {days} days.",
         DAYS, {}),
    Case("I want to return the {article}.", "delivered", (2, 30), "You can return it. You get {refund} euros back.",
         "{refund} euros", {"status": "returned"}),
    Case("May I send the {article} back?", "delivered", (31, 60), "No, it was delivered {days} days ago.", DAYS, {}),
    Case("Please send the {article} to {street} instead.", PACKED, (2, 5), "It goes to {street} now.",
         "{street}", {"street": "{street}"}),
    Case("Can you send the {article} to {street}?", SENT, (2, 5), "No, it was sent. It arrives in {days} days.",
         DAYS, {}),
)  # fmt: skip


class ServiceDesk(Environment):
    rewards_every_end = True

    def __init__(self, user_url: str | None = None, user_model: str = "", user_key_env: str | None = None):
        """With `user_url`, the model of that name there is the customer; without it, the task's lines are."""
        self.user_url, self.user_model, self.user_key_env = user_url, user_model, user_key_env

    def make_task(self, rng):
        customers, orders = {}, {}
        for name, number in zip(rng.sample(NAMES, 2), rng.sample(range(1000, 10000), 2), strict=True):
            customers[str(number)] = {"name": name, "postcode": str(rng.randrange(10000, 100000)), "orders": {}}
        number = next(iter(customers))
        chosen, articles = rng.sample(CASES, 3), rng.sample(ARTICLES, 6)
        wishes = []
        for place, order in enumerate(rng.sample(range(100, 1000), 6)):
            case, owner = chosen[place % 3], [*customers][place // 3]
            orders[str(order)], wish = self._order(case, f"{rng.choice(COLOURS)} {articles[place]}", rng)
            customers[owner]["orders"][orders[str(order)]["article"]] = str(order)
            wishes.append({"order": str(order), **wish})
        # The rest of the orders must stay as they are.
        payload = {"customer": number, "customers": customers, "orders": orders, "wishes": wishes[: rng.randint(1, 2)]}
        return Task((Message("system", RULES), Message("user", f"Hello! {wishes[0]['says']}")), payload)

    def _order(self, case, article, rng):
        """Return an order for which a case holds, and the wish about it."""
        street, other = (f"{street} {rng.randint(1, 99)}" for street in rng.sample(STREETS, 2))
        price, days = rng.randint(10, 99), rng.randint(*case.days)
        order = {"article": article, "price": price, "street": other, "status": case.status, "days": days}
        facts = {**order, "street": street, "refund": price - 5}
        said = {"says": case.wish, "fact": case.fact, "reply": case.reply}
        wish = {name: text.format(**facts) for name, text in said.items()}
        return order, {**wish, "change": {name: text.format(**facts) for name, text in case.change.items()}}

    def start(self, task):
        asked = task.payload
        self.customers, self.orders = copy.deepcopy((asked["customers"], asked["orders"]))
        number, known = asked["customer"], asked["customers"][asked["customer"]]
        wishes = [wish["says"] for wish in asked["wishes"]]
        if self.user_url is None:
            mine = f"My customer number is {number}, and my postcode is {known['postcode']}."
            self.user = ScriptedUser([mine, *(f"Thank you. {wish}" for wish in wishes[1:])])
        else:
            instructions = (
                f"You are {known['name']}, a customer who writes to a shop's service desk. Your customer number is "
                f"{number}, your postcode is {known['postcode']}: say them when you are asked. You say, one after the "
                f"other: {' Then: '.join(wishes)} Accept a no. When you have an answer to all of it, you are done."
            )
            self.user = SimulatedUser(
                instructions, url=self.user_url, model=self.user_model, api_key_env=self.user_key_env
            )

    async def respond(self, task, messages):
        return await self.user.respond(messages)

    @tool
    def find_customer(self, number: str, postcode: str) -> dict[str, str]:
        """Find a customer, and the numbers of the orders by article.

        Args:
            number: The customer's number.
            postcode: The customer's postcode.
        """
        known = self.customers.get(number)
        if known is None or known["postcode"] != postcode:
            raise KeyError("no customer has this number and this postcode")
        return known["orders"]

    @tool
    def look_up_order(self, order: str) -> dict[str, str | int]:
        """Look an order up: its article, price, street and status, and the days until it arrives or since it came.

        Args:
            order: The order's number.
        """
        return self._of(order)

    @tool
    def close_order(self, order: str, status: Literal["cancelled", "returned"]) -> dict[str, str | int]:
        """Cancel an order, or note that the customer returns it.

        Args:
            order: The order's number.
            status: What becomes of it.
        """
        return self._changed(order, status=status)

    @tool
    def change_street(self, order: str, street: str) -> dict[str, str | int]:
        """Send an order to another street.

        Args:
            order: The order's number.
            street: The new street, with the number of the house.
        """
        return self._changed(order, street=street)

    def _of(self, order):
        if order not in self.orders:
            raise KeyError(f"no order has the number {order!r}")
        return self.orders[order]

    def _changed(self, order, **change):
        self._of(order).update(change)
        return self._of(order)

    def reward(self, task, messages):
        """1 for the right database and all facts; half of the facts' share for less, and where a limit was the end."""
        wishes, wanted = task.payload["wishes"], copy.deepcopy(task.payload["orders"])
        for wish in wishes:
            wanted[wish["order"]].update(wish["change"])
        if self.orders != wanted:
            return 0.0
        said = "\n".join(each.content for each in messages if each.role == "assistant" and not each.tool_calls)
        share = sum(bool(re.search(rf"\b{re.escape(wish['fact'])}\b", said)) for wish in wishes) / len(wishes)
        return 1.0 if share == 1 and self.stop_reason == "answered" else 0.5 * share

    def demonstrate(self, task, messages, rng):
        """What a careful colleague says next; the customer's lines are scripted."""
        number, wishes = task.payload["customer"], task.payload["wishes"]
        found = {"number": number, "postcode": task.payload["customers"][number]["postcode"]}
        script = [
            Message("assistant", "What are your customer number and your postcode?"),
            call("find_customer", found),
        ]
        for wish in wishes:
            script.append(call("look_up_order", {"order": wish["order"]}))
            if wish["change"]:
                name = "change_street" if "street" in wish["change"] else "close_order"
                script.append(call(name, {"order": wish["order"], **wish["change"]}))
            script.append(Message("assistant", wish["reply"]))
        return script[sum(message.role == "assistant" for message in messages)]


def call(name, arguments):
    return Message("assistant", "", tool_calls=(ToolCall(name, arguments),))
