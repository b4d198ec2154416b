"""Lossless speculative decoding: plain and with a drafter, its schedules, and reports of what it gained."""
