"""Regression against stock SGLang: the same scenarios on two servers, compared answer by answer."""
