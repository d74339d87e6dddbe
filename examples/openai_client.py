"""OpenAI's own client with a model of yours: a stream, the thinking, JSON, and log-probabilities.

    pip install openai
    mlx-k3 serve                                                     # in another terminal
    python examples/openai_client.py [http://127.0.0.1:8080/v1]

A server that was started with a key wants it in OPENAI_API_KEY.
"""

import os
import sys

from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """What is asked for as JSON."""

    name: str
    age: int


def main() -> None:
    """Show each way once."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    [model] = [model.id for model in client.models.list()]
    print("Model:", model)

    def user(text: str) -> list:
        return [{"role": "user", "content": text}]

    thinking = True
    print("Thinking: ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=user("What is 47 + 85?"), temperature=0, stream=True
    ):
        delta = chunk.choices[0].delta
        if delta.content and thinking:
            thinking = False
            print("\nAnswer: ", end="")
        print(delta.content or getattr(delta, "reasoning_content", ""), end="", flush=True)
    print()

    reply = client.chat.completions.parse(
        model=model,
        messages=user("Mira is 34 years old and lives in Oslo."),
        temperature=0,
        response_format=Person,
    )
    person = reply.choices[0].message.parsed
    print(f"JSON: {person.name} is {person.age}")

    # Without thinking, and how sure the model is of each token.
    reply = client.chat.completions.create(
        model=model,
        messages=user("Hello!"),
        temperature=0,
        reasoning_effort="none",
        logprobs=True,
    )
    [choice] = reply.choices
    least = min(choice.logprobs.content, key=lambda entry: entry.logprob)
    print(f"At once: {choice.message.content} (least sure of {least.token!r})")
    print(f"{reply.usage.prompt_tokens} + {reply.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
