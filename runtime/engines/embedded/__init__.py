"""The embedded engine: a small batched decoder for HF causal LMs behind the engines' HTTP contract.

Reading order: ``decoder`` (why and how it decodes), ``scheduler`` (who decodes when), ``server``
and ``control`` (the wire), ``owner`` (the process). For CPUs and small models; SGLang serves the
others.
"""
