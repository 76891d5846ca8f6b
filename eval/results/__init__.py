"""Results of evaluation.

records  scores, details and snapshots, and the files that hold them
details  what a page shows besides the scores, computed by tasks
table    the table of all scores that reports and comparisons are views of
"""
