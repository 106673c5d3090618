"""What the paper says, judged: each test, and what a figure's verdicts can and cannot say."""

from math import nan

import numpy as np
import pytest

from fedbandit.paper.catalogue import (
    OURS,
    TESTS,
    MemberResult,
    Sentence,
    figure,
    figure_names,
    judge,
)
from fedbandit.results.differences import holm


def _said(test):
    """Sentences of a test about some members."""
    return lambda *members, **more: Sentence(test, members, "", **more)


above, alike, differs, near_best = map(_said, ("above", "alike", "differs", "near_best"))
never_hurts, drops, steady = map(_said, ("never_hurts", "drops", "steady"))
grows_surer, matters_more = map(_said, ("grows_surer", "matters_more"))


def _ended(*final, **more):
    return MemberResult(dict(enumerate(final)), **more)


def _verdict(sentence, **results):
    return judge([sentence], results)[0].verdict


def test_verdicts_need_students_t_not_two_standard_errors():
    two = {"a": _ended(1.0, 1.1), "b": _ended(0.9, 0.98)}
    by = two["a"].minus(two["b"])
    assert by.mean() > 2 * by.std(ddof=1) / np.sqrt(2)
    assert _verdict(above("a", "b"), **two) == "not clear"
    a, b, c = _ended(1.0, 1.1, 1.2), _ended(0.8, 0.9, 1.01), _ended(0.7, 1.4, 1.1)
    assert _verdict(above("a", "b"), a=a, b=b) == "agrees"
    assert _verdict(above("b", "a"), a=a, b=b) == "disagrees"
    assert _verdict(above("a", "c"), a=a, c=c) == "not clear"
    assert _verdict(alike("a", "b"), a=a, b=b) == "disagrees"
    assert _verdict(differs("a", "b"), a=a, b=b) == "agrees"
    assert _verdict(alike("a", "a"), a=a) == "agrees"
    assert _verdict(alike("a", "c"), a=a, c=c) == "not clear"
    assert _verdict(above("a", "b"), a=_ended(1.0), b=_ended(0.1)) == "not clear"


def test_the_best_or_close_to_it():
    results = {
        "a": _ended(0.99, 1.0, 0.98),
        "b": _ended(1.0, 1.01, 1.0),
        "c": _ended(0.2, 0.3, 0.2),
    }
    assert _verdict(near_best("a", "b", "c"), **results) == "agrees"
    assert _verdict(near_best("b", "a", "c"), **results) == "agrees"
    [lost] = judge([near_best("c", "a", "b")], results)

    def _mean(label):
        return results[label].mean

    assert lost.verdict == "disagrees"
    assert lost.difference == pytest.approx(_mean("c") - _mean("b"))


def test_a_small_but_clear_loss_hurts():
    a, b = _ended(0.980, 0.981, 0.979), _ended(1.0, 1.001, 0.999)
    assert _verdict(alike("a", "b"), a=a, b=b) == "agrees"
    assert _verdict(never_hurts("a", "b"), a=a, b=b) == "disagrees"
    assert _verdict(never_hurts("b", "a"), a=a, b=b) == "agrees"
    level = _ended(0.97, 1.03, 1.0, 0.99, 1.01, 1.0)
    other = _ended(1.0, 1.0, 1.0, 1.0, 1.0, 1.01)
    assert _verdict(never_hurts("a", "b"), a=level, b=other) == "agrees"


def test_a_drop_agrees_only_at_about_the_size_that_the_paper_states():
    whole = _ended(1.0, 1.01, 0.99)
    lost = drops("a", "b", stated=(0.81, 0.62))
    assert _verdict(lost, a=whole, b=_ended(0.76, 0.77, 0.75)) == "agrees"
    assert _verdict(lost, a=whole, b=_ended(0.25, 0.26, 0.24)) == "disagrees"  # 75%
    assert _verdict(lost, a=whole, b=_ended(0.98, 0.99, 0.97)) == "disagrees"
    survived = _ended(0.76, 0.77, diverged=(2,))
    assert _verdict(lost, a=whole, b=survived) == "not clear"


def test_steady_trials():
    assert _verdict(steady("a"), a=_ended(1.0, 1.001, 1.0, 0.999)) == "agrees"
    assert _verdict(steady("a"), a=_ended(1.0, 1.3, 1.0)) == "disagrees"
    assert _verdict(steady("a"), a=_ended(1.0, 1.02, 1.0)) == "not clear"
    assert _verdict(steady("a"), a=_ended(1.0, 1.3)) == "disagrees"
    assert _verdict(steady("a"), a=_ended(1.0)) == "not clear"


def test_probabilities_count_from_the_first_deployment():
    def run(rows):
        return MemberResult({}, propensity=dict(enumerate(rows)))

    jump = run([[0.02, 0.50, 0.50, 0.50], [0.02, 0.51, 0.50, 0.51], [0.02, 0.49, 0.5, 0.48]])
    rising = run([[0.02, 0.50, 0.60, 0.71], [0.02, 0.51, 0.6, 0.70], [0.02, 0.49, 0.6, 0.72]])
    assert _verdict(grows_surer("a"), a=jump) == "not clear"
    assert _verdict(grows_surer("a"), a=rising) == "agrees"
    late = run([[0.02, 0.50, 0.55, 0.4], [0.02, 0.51, 0.55, 0.41], [0.02, 0.49, 0.55, 0.4]])
    results = {"noisy": late, "plain": rising}
    assert _verdict(matters_more("noisy", "plain", early=False), **results) == "agrees"
    assert _verdict(matters_more("noisy", "plain", early=True), **results) == "disagrees"


def test_tuned_rates_are_counted_by_signs_and_published_ones_not_at_all():
    def chosen(rate):
        return MemberResult({}, server_rate=rate)

    pairs = [(f"small{i}", f"large{i}") for i in range(7)]
    results = {f"small{i}": chosen(0.001) for i in range(7)}
    results |= {f"large{i}": chosen(0.02) for i in range(7)}
    smaller, few = (
        Sentence("smaller_rates", tuple(label for pair in some for label in pair), "")
        for some in (pairs, pairs[:2])
    )
    assert _verdict(smaller, **results) == "agrees"
    assert _verdict(few, **results) == "not clear"
    assert _verdict(smaller, **dict.fromkeys(results, chosen(nan))) == "not clear"
    rates = [said for _, said in _all_sentences() if said.test == "smaller_rates"]
    assert len(rates) == 1
    assert rates[0].about_tuning


def test_every_test_judges_a_sentence_of_the_catalogue():
    assert {said.test for _, said in _all_sentences()} == TESTS.keys()


def test_scope_and_our_own_sentences_are_measured_and_never_judged():
    results = {"a": _ended(1.0, 1.01, 1.0), "b": _ended(0.1, 0.11, 0.1)}
    verdicts = judge([above("a", "b", kind=kind) for kind in ("claim", "scope", "ours")], results)
    assert [one.verdict for one in verdicts] == ["agrees", "measured", "measured"]
    assert verdicts[0].p == judge([above("a", "b")], results)[0].p  # the others do not count


def test_false_verdicts_of_a_figure_are_bounded_jointly():
    """Twelve true nulls a figure: any verdict is false, and at most 5% of figures may have one."""
    rng = np.random.default_rng(3)
    sentences = [above(f"m{i}", "base") for i in range(12)]
    wrong = 0
    for _ in range(300):
        draws = rng.normal(size=(13, 5))
        results = {f"m{i}": _ended(*row) for i, row in enumerate(draws[:12])}
        results["base"] = _ended(*draws[12])
        wrong += any(one.verdict != "not clear" for one in judge(sentences, results))
    assert wrong <= 300 * 0.05 + 3 * np.sqrt(300 * 0.05 * 0.95)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def _all_sentences():
    for name in [*figure_names(), *OURS]:
        for family in ("emnist", "so") if name.startswith("ablation") else (None,):
            for sentence in figure(name, family).sentences:
                yield name, sentence


def test_quotes_are_the_papers_own_words(real_data_folder):
    """Outside brackets every claim's words stand in the paper, in this order."""
    [text] = (real_data_folder.parent / "paper").glob("*.txt")
    words = _plain(text.read_text(encoding="utf-8"))
    for _, sentence in _all_sentences():
        if sentence.kind == "ours":
            continue
        for part in _outside_brackets(sentence.words):
            assert _plain(part) in words, part


def _outside_brackets(text):
    import re

    return [part for part in re.split(r"\[[^\]]*\]", text) if part.strip()]


def _plain(text):
    import re

    text = re.sub(r"\\(emph|textbf|cref|Cref|ref)\b", " ", text)
    for macro, word in {"egreedy": "egreedy", "so": "so", "initshift": "init shift"}.items():
        text = re.sub(rf"\\{macro}\b", word, text)
    text = re.sub(r"\(?figures? [0-9a-z]+\)?", " ", text.lower())
    return " ".join(re.findall(r"[a-z0-9.]+", text))


def test_no_sentence_is_judged_that_is_no_claim():
    kinds = {(name, sentence.kind) for name, sentence in _all_sentences()}
    assert ("population", "claim") not in kinds  # what the paper leaves out
    assert ("weights", "claim") not in kinds  # the paper says it of epsilon-greedy
    assert ("extrapolation", "claim") not in kinds  # expected of EMNIST, tried on text
    identical = {
        (name, sentence.members[0])
        for name, sentence in _all_sentences()
        if sentence.words.startswith("nearly identical")
    }
    assert identical == {("fig2b", "softmax"), ("fig2b", "epsilon-greedy")}


@pytest.mark.parametrize("family", ["so", "emnist"])
def test_what_is_said_of_tuned_optimisers_is_not_judged_at_other_rates(family):
    said = figure("ablation-server-optimizer", family).sentences
    assert all(one.about_tuning for one in said)
