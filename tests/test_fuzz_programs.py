"""A small, fixed search; ``python -m tests.fuzz.programs N SEED`` runs a longer one."""

from fuzz.programs import search


def test_equal_keys_mean_equal_programs():
    report = search(350, seed=1)
    assert report.wrong == []
    # The search is worth something only if it finds equal programs and different ones.
    assert report.programs > 300
    assert report.twins > 100
    assert report.texts[0] > 150
    # Precision: a program that is traced again is the same program. In mode "full" it is not when
    # vmap has wrapped the rule of a custom derivative.
    assert report.missed[1] == []
    assert len(report.missed[0]) < report.twins / 10
