from agentloop import Environment, Observation, Task


class NumberGame(Environment):
    def make_task(self, rng):
        return Task("Guess my number, from 1 to 20. Write the number alone.", {"number": rng.randint(1, 20)})

    def respond(self, task, messages):
        guess, number = messages[-1].content.strip(), task.payload["number"]
        if not guess.isdecimal():
            return "Write a number alone."
        if int(guess) == number:
            return Observation("Right!", reward=1.0, over=True)
        return "Higher." if int(guess) < number else "Lower."
