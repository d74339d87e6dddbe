"""A model inside a Python program: an answer, a stream, JSON, and a conversation.

python examples/python_import.py              # the model that travels with mlx-k3
python examples/python_import.py FOLDER       # one that mlx-k3 convert wrote
"""

import json
import sys

from mlx_k3 import generate, load, nano, stream_generate
from mlx_k3.chat.session import Session

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def main() -> None:
    """Show each way once."""
    # For a model larger than memory: load(folder, memory="96GB").
    model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else nano.converted())

    print("An answer:", generate(model, tokenizer, "What is 47 + 85?"))

    print("Thinking: ", end="")
    answering = False
    for chunk in stream_generate(model, tokenizer, "Sort: 7, 3, 5."):
        if chunk.text and not answering:
            answering = True
            print("\nAnd its answer: ", end="")
        print(chunk.text or chunk.reasoning, end="", flush=True)
    print()

    text = "Mira is 34 years old and lives in Oslo."
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    person = json.loads(generate(model, tokenizer, text, response_format=wanted))
    print(f"JSON: {person['name']} is {person['age']}")

    # A session remembers; what it has read before, it does not read again.
    session = Session(model, tokenizer)
    for question in ("What is 12 + 30?", "What is 47 + 85?"):
        *_, last = session.turn(question)
        print(f"{question} -> {last.reply.text} ({last.reply.cached_tokens} tokens known before)")


if __name__ == "__main__":
    main()
