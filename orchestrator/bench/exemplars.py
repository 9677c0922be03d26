"""Solved word problems of our own that may precede a question; none of them is in a question set."""

from __future__ import annotations

EXEMPLARS: tuple[tuple[str, str], ...] = (
    (
        "Mira has 3 boxes with 8 pencils each. She gives 5 pencils away. How many pencils has she left?",
        "Mira has 3 * 8 = 24 pencils. After giving 5 away she has 24 - 5 = 19 pencils left.\n#### 19",
    ),
    (
        "A ticket costs $6. Four friends buy one each and share a $10 meal. How much do they spend together?",
        "The tickets cost 4 * 6 = 24 dollars. With the meal they spend 24 + 10 = 34 dollars.\n#### 34",
    ),
    (
        "A bus has 40 seats, half of them taken. At the next stop 7 more people sit down. How many seats are free?",
        "Half of 40 is 40 / 2 = 20 seats taken. Then 20 + 7 = 27 are taken, so 40 - 27 = 13 are free.\n#### 13",
    ),
    (
        "Otto walks 2 km on each of 5 days and 9 km on Saturday. How many kilometres does he walk?",
        "On the 5 days he walks 5 * 2 = 10 km. With Saturday he walks 10 + 9 = 19 km.\n#### 19",
    ),
)
