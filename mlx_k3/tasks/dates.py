"""Weekdays, months, leap years, days of a month and times of day.

Owns these families and their worked steps. Knows the Gregorian calendar from 1900 to 2099.
"""

import calendar
import random

from .arithmetic import key as sum_key
from .example import Example, Family, question, same_text
from .wording import polite, words

WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_WEEKDAY_AFTER = (
    "Today is {day}. What day is it in {n} days?", "If today is {day}, what day is it in {n} days?",
    "Which weekday is {n} days after {day}?", "It is {day}. Which day will it be in {n} days?",
    "What day comes {n} days after {day}?", "{n} days after {day} is which day?",
    "What weekday is it {n} days from {day}?",
)  # fmt: skip
_WEEKDAY_BEFORE = (
    "Today is {day}. What day was it {n} days ago?", "Which weekday is {n} days before {day}?",
    "If today is {day}, what day was it {n} days ago?", "What day comes {n} days before {day}?",
    "{n} days before {day} is which day?", "It is {day}. Which day was it {n} days ago?",
)  # fmt: skip
_MONTH_AFTER = (
    "Which month comes {n} months after {month}?", "What month is {n} months after {month}?",
    "It is {month}. Which month is it in {n} months?", "What is {month} plus {n} months?",
    "{n} months after {month} is which month?",
)  # fmt: skip
_MONTH_BEFORE = (
    "Which month comes {n} months before {month}?", "What month is {n} months before {month}?",
    "It is {month}. Which month was it {n} months ago?", "Which is {n} months before {month}?",
)  # fmt: skip
_LEAP = (
    "Is {year} a leap year?", "Was {year} a leap year?", "{year}: leap year or not?",
    "Does {year} have 366 days?", "Is the year {year} a leap year?",
    "Did {year} have a 29 February?", "Tell me whether {year} is a leap year.",
)  # fmt: skip
_LENGTH = (
    "How many days does {month} have?", "How many days are in {month}?", "How long is {month}?",
    "What is the number of days in {month}?", "Number of days in {month}?", "Days in {month}?",
    "How many days are there in {month}?", "How many days has {month}?",
    "Tell me how many days {month} has.", "How many days long is {month}?",
)  # fmt: skip
_DATE_AFTER = (
    "What date is {n} days after {day} {month}?", "Which date is {n} days after {day} {month}?",
    "It is {day} {month}. What is the date in {n} days?", "{day} {month} plus {n} days?",
    "Today is {day} {month}. Which date is it in {n} days?",
)  # fmt: skip
_TIME_AFTER = (
    "It is {time}. What time is it in {n} minutes?", "What time is it {n} minutes after {time}?",
    "Which time is {n} minutes after {time}?", "What is {time} plus {n} minutes?",
    "A film starts at {time} and takes {n} minutes. When does it end?",
    "The bus leaves at {time} and drives for {n} minutes. When does it arrive?",
    "{time} plus {n} minutes?", "Now it is {time}. What will the clock say in {n} minutes?",
)  # fmt: skip


def _walk(names: list[str], start: int, steps: int) -> list[str]:
    """The names after ``start``, one by one, ``steps`` of them; backwards if negative."""
    way = 1 if steps > 0 else -1
    return [names[(start + way * i) % len(names)] for i in range(1, abs(steps) + 1)]


def _with_sum(key: str, operator: str, a: int, b: int) -> str:
    """``key``, and that of a sum of two-digit numbers in the steps: held out as elsewhere."""
    return f"{key}\n{sum_key(operator, a, b)}" if min(a, b) > 9 else key


def _make_weekday(rng: random.Random) -> Example:
    start, n, back = rng.randrange(7), rng.randrange(2, 61), rng.random() < 0.35
    whole, rest = n // 7 * 7, n % 7
    day = WEEKDAYS[start]
    names = _walk(WEEKDAYS, start, -rest if back else rest)
    answer = names[-1] if names else day
    steps = f"{n} = {whole} + {rest}. {', '.join([day, *names])}."
    text = rng.choice(_WEEKDAY_BEFORE if back else _WEEKDAY_AFTER).format(day=day, n=n)
    key = f"weekday {day} {'-' if back else '+'}{n}"
    return question("weekdays", polite(rng, text), steps, f"It is {answer}.", key)


def _make_month(rng: random.Random) -> Example:
    start, n, back = rng.randrange(12), rng.randrange(2, 12), rng.random() < 0.4
    month = MONTHS[start]
    names = _walk(MONTHS, start, -n if back else n)
    steps = ", ".join([f"0 {month}", *(f"{i} {name}" for i, name in enumerate(names, 1))]) + "."
    text = rng.choice(_MONTH_BEFORE if back else _MONTH_AFTER).format(month=month, n=n)
    key = f"month {month} {'-' if back else '+'}{n}"
    return question("months", polite(rng, text), steps, f"It is {names[-1]}.", key)


def _make_month_length(rng: random.Random) -> Example:
    index, form = rng.randrange(12), rng.randrange(len(_LENGTH))
    month, days = MONTHS[index], _DAYS[index]
    answer = f"{month} has {days} days."
    if month == "February":
        answer = "February has 28 days, and 29 in a leap year."
    text = polite(rng, _LENGTH[form].format(month=month))
    return question("months", text, "I know this.", answer, f"days of {month} {form}")


def _make_months(rng: random.Random) -> Example:
    return _make_month(rng) if rng.random() < 0.7 else _make_month_length(rng)


def _make_leap(rng: random.Random) -> Example:
    year = rng.randrange(1900, 2100)
    last = year % 100
    if last:
        rest = last % 4
        steps = f"{year} ends in {last:02}. {last} = {last - rest} + {rest}."
    else:
        steps = f"{year} is a full century and {'a' if year == 2000 else 'no'} multiple of 400."
    if calendar.isleap(year):
        answer = f"Yes, {year} is a leap year."
    else:
        answer = f"No, {year} is not a leap year."
    text = polite(rng, rng.choice(_LEAP).format(year=year))
    return question("leap_years", text, steps, answer, f"leap {year}")


def _make_date(rng: random.Random) -> Example:
    index = rng.choice([i for i, name in enumerate(MONTHS) if name != "February"])
    month, length = MONTHS[index], _DAYS[index]
    day, n = rng.randrange(1, length + 1), rng.randrange(2, 29)
    total = day + n
    steps = f"{day} + {n} = {total}. {month} has {length} days."
    key = _with_sum(f"date {day} {month} {n}", "+", day, n)
    if total > length:
        steps += f" {total} - {length} = {total - length}."
        key = _with_sum(key, "-", total, length)
        total, month = total - length, MONTHS[(index + 1) % 12]
    steps += f" {total} {month}."
    text = rng.choice(_DATE_AFTER).format(day=day, month=MONTHS[index], n=n)
    return question("dates", polite(rng, text), steps, f"It is {total} {month}.", key)


def _make_time(rng: random.Random) -> Example:
    hour, minute, n = rng.randrange(24), rng.randrange(60), rng.randrange(2, 61)
    total = minute + n
    key = _with_sum(f"time {hour}:{minute:02} {n}", "+", minute, n)
    steps = f"{minute} + {n} = {total}."
    later = hour
    if total >= 60:
        steps += f" {total} - 60 = {total - 60}. {hour} + 1 = {hour + 1}."
        key = _with_sum(key, "-", total, 60)
        total, later = total - 60, (hour + 1) % 24
    time = f"{later}:{total:02}"
    text = rng.choice(_TIME_AFTER).format(time=f"{hour}:{minute:02}", n=n)
    return question("times", polite(rng, text), f"{steps} {time}.", f"It is {time}.", key)


FAMILIES = (
    Family("weekdays", 2.5, _make_weekday, same_text),
    Family("months", 2, _make_months, same_text),
    Family("leap_years", 1, _make_leap, same_text),
    Family("dates", 2.5, _make_date, same_text),
    Family("times", 2.5, _make_time, same_text),
)
