"""The ruler counts texts that are small enough to count by hand."""

from conformance.structure.ruler import Count, measure_text

PACKED = '''"""Docstring."""
def work(one, size=2):  # behind
    """Docstring."""
    return [*(size if one else 3 if size else 4,)]
'''

# The same program.
UNPACKED = '''"""Docstring."""


# above
def work(
    one,
    size=2
):
    return [
        *(
            size if one else 3 if size else 4,
        )
    ]
'''


def test_every_count_of_a_text():
    assert measure_text(PACKED) == Count(
        tokens=26,
        code_lines=2,
        conditionals=2,
        nested_conditionals=1,
        literal_splats=1,
        names=2,
        no_nouns=1,
        comments_behind=1,
    )


def test_packing_changes_lines_but_not_tokens():
    packed = measure_text(PACKED)
    unpacked = measure_text(UNPACKED)
    assert unpacked.tokens == packed.tokens
    assert (packed.code_lines, unpacked.code_lines) == (2, 9)
    assert (unpacked.comments_above, unpacked.comments_behind) == (1, 0)


def test_an_fstring_is_one_token_in_every_python():
    assert measure_text('name = f"{a!r} of {b:>{width}}"\n').tokens == 3


def test_columns_count_in_comments_too():
    assert measure_text(f"# {'x' * 99}\n").over_100_columns == 1
    assert measure_text(f"# {'x' * 98}\n").over_100_columns == 0
