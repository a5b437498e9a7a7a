"""Reporting for all studies: names and colours, tables, verdicts on claims, plots."""

# The engine re-exports the tables, which in turn use its readings: it has to be imported first.
import studies.engine  # noqa: F401
