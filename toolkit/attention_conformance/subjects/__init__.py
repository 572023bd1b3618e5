"""Attentions of anybody: what each expects, how it is found out, and how a problem becomes a call of it."""
