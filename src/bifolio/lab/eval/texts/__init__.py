"""Texts written for this project: a story and forty sentences, each in English and Slovak."""
