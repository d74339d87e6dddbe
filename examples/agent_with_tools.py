"""A small agent: the model calls tools until it knows the answer.

    pip install openai
    mlx-k3 serve                                                     # in another terminal
    python examples/agent_with_tools.py "What is 483 * 17?" [http://127.0.0.1:8080/v1]

A server that was started with a key wants it in OPENAI_API_KEY.
"""

import ast
import json
import operator
import os
import sys
from datetime import datetime

from openai import OpenAI

MOST_STEPS = 8
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(expression: str) -> str:
    """Evaluate an expression of numbers and + - * /: read as a tree, never run as code."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only numbers and + - * /")

    return f"{value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def clock() -> str:
    """The time here."""
    return datetime.now().strftime("%H:%M")


TOOLS = {"calculator": calculator, "clock": clock}
DECLARATIONS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "The time now.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
]


def run_tool(name: str, arguments: str) -> str:
    """A tool's result; a mistake of the model's is told to it, and it may try again."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError, SyntaxError, ZeroDivisionError) as e:
        return f"error: {e}"


def answer(client: OpenAI, model: str, question: str) -> str:
    """Ask, run what is called, and tell the results, until there is an answer."""
    messages: list = [{"role": "user", "content": question}]
    for _ in range(MOST_STEPS):
        [choice] = client.chat.completions.create(
            model=model, messages=messages, tools=DECLARATIONS, temperature=0
        ).choices
        messages.append(choice.message)
        if not choice.message.tool_calls:
            return choice.message.content or ""
        for call in choice.message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            print(f"  {call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"no answer after {MOST_STEPS} steps"


def main() -> None:
    """Answer the question on the command line."""
    question = sys.argv[1] if len(sys.argv) > 1 else "What is 483 * 17?"
    url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8080/v1"
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    [model] = [model.id for model in client.models.list()]
    print(question)
    print(answer(client, model, question))


if __name__ == "__main__":
    main()
