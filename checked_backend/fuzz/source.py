"""Programs as the syntax tree of a Python function, whose text is the code that is compiled and that people read.

The tree is built from the program's data: texts in it are constants, and names are those of known operations.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

from checked_backend.fuzz.control import Block, Item, parse
from checked_backend.fuzz.known import INFIX, METHOD, OPERATORS, operation
from checked_backend.fuzz.program import Constant, FuzzProgram, Ref, Size, Statement

NAME = "program"
"""The name of the function."""


def function_of(programs: Sequence[FuzzProgram]) -> ast.FunctionDef:
    """One function for several programs. It takes the inputs of all, and returns a tuple of results for each.

    The result of one program is its tuple of results.
    """
    several = len(programs) > 1
    writers = [_Writer(one, f"p{number}_" if several else "") for number, one in enumerate(programs)]
    flags = [pair for writer in writers for pair in writer.flags]
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(name) for writer in writers for name in writer.inputs],
        kwonlyargs=[ast.arg(name) for name, _ in flags],
        kw_defaults=[ast.Constant(value) for _, value in flags],
        defaults=[],
    )
    body = [statement for writer in writers for statement in writer.body()]
    results: list[ast.expr] = [writer.results() for writer in writers]
    body.append(ast.Return(ast.Tuple(results, ast.Load()) if several else results[0]))
    return ast.fix_missing_locations(ast.FunctionDef(NAME, arguments, body, []))


class _Writer:
    """Writes one program.

    Attributes:
        flags: The names of its flags, with their values.
    """

    def __init__(self, program: FuzzProgram, prefix: str) -> None:
        self._program = program
        self._tree = parse(program)
        self.inputs = [f"{prefix}x{place}" for place in range(len(program.inputs))]
        letters = {"for": "i", "flag": "flag"}
        self._names = [
            *self.inputs,
            *(f"{prefix}{letters.get(call.op, 'v')}{place}" for place, call in enumerate(program.calls)),
        ]
        self.flags = [
            (self._names[len(self.inputs) + place], call.args[0])
            for place, call in enumerate(program.calls)
            if call.op == "flag"
        ]

    def body(self) -> list[ast.stmt]:
        return self._statements(self._tree)

    def results(self) -> ast.expr:
        returned: list[ast.expr] = [self._name(place) for place in self._program.returns]
        return ast.Tuple(returned, ast.Load()) if returned else ast.Constant(None)

    def _name(self, number: int, *, stored: bool = False) -> ast.Name:
        return ast.Name(self._names[number], ast.Store() if stored else ast.Load())

    # statements

    def _statements(self, items: Sequence[Item]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for item in items:
            found += [self._block(item)] if isinstance(item, Block) else self._statement(item)
        return found

    def _block(self, block: Block) -> ast.stmt:
        call = self._program.calls[block.head]
        body = self._statements(block.body) or [ast.Pass()]
        if call.op == "if":
            return ast.If(self._condition(call.args), body, self._statements(block.otherwise))
        turns = ast.Call(ast.Name("range", ast.Load()), [self._expression(call.args[0])], [])
        return ast.For(self._name(len(self.inputs) + block.head, stored=True), turns, body, [])

    def _condition(self, args: Sequence[Any]) -> ast.expr:
        if len(args) == 1:
            return self._expression(args[0])
        return _operated(args[1], self._expression(args[0]), self._expression(args[2]))

    def _statement(self, place: int) -> list[ast.stmt]:
        call, target = self._program.calls[place], self._name(len(self.inputs) + place, stored=True)
        match call.op:
            case "flag":
                return []
            case "let":
                return [ast.Assign([self._name(call.args[0].value, stored=True)], self._expression(call.args[1]))]
            case "setitem":
                part = ast.Subscript(self._expression(call.args[0]), self._index(call.args[1]), ast.Store())
                return [ast.Assign([part], self._expression(call.args[2]))]
        if call.op in OPERATORS and call.op not in INFIX and call.op != "getitem":  # it is one like +=
            first, second = map(self._expression, call.args)
            node: Any = INFIX[call.op[:-1]].node
            updated = ast.AugAssign(ast.Name(target.id, ast.Store()), node(), second)
            return [ast.Assign([target], first), updated]
        return [ast.Assign([target], self._called(call))]

    def _called(self, call: Statement) -> ast.expr:
        how, function = operation(call.op)
        if call.op == "getitem":
            return ast.Subscript(self._expression(call.args[0]), self._index(call.args[1]), ast.Load())
        args = [self._expression(argument) for argument in call.args]
        if call.op in OPERATORS:
            return _operated(call.op, *args)
        words = [ast.keyword(key, self._expression(value)) for key, value in call.kwargs.items()]
        if how == METHOD:
            return ast.Call(ast.Attribute(args[0], function, ast.Load()), args[1:], words)
        return ast.Call(_dotted(call.op), args, words)

    # expressions

    def _index(self, raw: Any) -> ast.expr:
        if isinstance(raw, tuple):
            return ast.Tuple([self._index(item) for item in raw], ast.Load())
        if isinstance(raw, slice):
            return ast.Slice(
                *(None if part is None else self._expression(part) for part in (raw.start, raw.stop, raw.step))
            )
        return self._expression(raw)

    def _expression(self, raw: Any) -> ast.expr:
        match raw:
            case Ref(value):
                return self._name(value)
            case Size(value, dim):
                return ast.Call(ast.Attribute(self._name(value), "size", ast.Load()), [_literal(dim)], [])
            case Constant(name):
                return _dotted(f"torch.{name}")
            case tuple():
                return ast.Tuple([self._expression(item) for item in raw], ast.Load())
            case list():
                return ast.List([self._expression(item) for item in raw], ast.Load())
            case dict():
                keys: list[ast.expr | None] = [ast.Constant(key) for key in raw]
                return ast.Dict(keys, [self._expression(item) for item in raw.values()])
            case slice():
                parts = [self._expression(part) for part in (raw.start, raw.stop, raw.step)]
                return ast.Call(ast.Name("slice", ast.Load()), parts, [])
        return _literal(raw)


def _operated(symbol: str, left: ast.expr, right: ast.expr) -> ast.expr:
    node: Any = INFIX[symbol].node()
    return ast.Compare(left, [node], [right]) if isinstance(node, ast.cmpop) else ast.BinOp(left, node, right)


def _dotted(name: str) -> ast.expr:
    first, *rest = name.split(".")
    found: ast.expr = ast.Name(first, ast.Load())
    for part in rest:
        found = ast.Attribute(found, part, ast.Load())
    return found


def _literal(raw: Any) -> ast.expr:
    if isinstance(raw, float) and not math.isfinite(raw):
        return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(str(raw))], [])
    negative = math.copysign(1, raw) < 0 if isinstance(raw, float) else isinstance(raw, int) and raw < 0
    if negative:
        return ast.UnaryOp(ast.USub(), ast.Constant(-raw))
    return ast.Constant(raw)
