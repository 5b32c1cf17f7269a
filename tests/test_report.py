from dla.report import table


def test_columns_line_up():
    text = table([{"name": "a", "n": 1, "x": 0.5}, {"name": "longer", "n": 200, "x": None}])
    assert text.splitlines() == [
        "name      n      x",
        "------  ---  -----",
        "a         1  0.500",
        "longer  200      –",
    ]


def test_no_rows_no_table():
    assert table([]) == ""
