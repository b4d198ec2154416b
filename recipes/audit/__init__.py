"""The audits that ``tokennorm audit`` runs: ``sft`` and ``dspark`` are of the recipes of these names."""
