"""What is said of a call as a whole."""

from __future__ import annotations

from checked_backend.regions.call_findings import candidate_crashed

COMPILER_OUTPUT = """C++ compile error

Command:
g++ kernel.cpp -O3

Output:
kernel.cpp: In function 'kernel':
kernel.cpp:32:26: error: conflicting declaration 'auto x'
   32 |     auto x = load(a);
      |          ^
torch/headers/vec.h:244:25: warning: overflow in conversion
  244 |       0xff, 0xff, 0xff, 0xff,
      |             ^~~~
torch/headers/vec.h:245:25: warning: overflow in conversion
  245 |       0xff, 0xff, 0xff, 0xff,
      |             ^~~~"""


def test_of_a_compilers_output_the_errors_are_told() -> None:
    assert candidate_crashed(RuntimeError(COMPILER_OUTPUT), during="backward").message == (
        "running its backward pass it raised, eager does not: RuntimeError: C++ compile error\n"
        "kernel.cpp:32:26: error: conflicting declaration 'auto x'\n"
        "   32 |     auto x = load(a);\n"
        "(13 more lines of the compiler's output)"
    )


def test_other_exceptions_are_told_whole() -> None:
    for text in ("kernel.cpp:1:1: error: missing ';'", "\n".join(f"line {number}" for number in range(30))):
        assert candidate_crashed(ValueError(text), during="running").message.endswith(f"ValueError: {text}")
