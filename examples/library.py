import sqlite3

from agentloop import Environment, Message, Task, ToolCall, tool


class Library(Environment):
    one_thread = True  # SQLite's connections belong to the thread that opened them

    def make_task(self, rng):
        opening = Message("system", "You count before you answer."), Message("user", "How many books are there?")
        return Task(opening, {"books": rng.randint(1, 99)})

    def start(self, task):
        titles = [(f"Volume {number}",) for number in range(task.payload["books"])]
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table books (title)")
        self.database.executemany("insert into books values (?)", titles)

    def close(self):
        self.database.close()

    @tool
    def count(self, prefix: str = "") -> int:
        """Count the books whose titles begin like this."""
        return self.database.execute("select count(*) from books where title glob ?", [prefix + "*"]).fetchone()[0]

    def reward(self, task, messages):
        return float(messages[-1].content.strip() == str(task.payload["books"]))

    def demonstrate(self, task, messages, rng):
        if messages[-1].role == "user":
            return Message("assistant", "", tool_calls=(ToolCall("count", {}),))
        return Message("assistant", messages[-1].content)
