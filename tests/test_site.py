"""The documentation site can be read from a disk."""

import pytest
from scripts.site_hooks import on_post_page


@pytest.mark.parametrize("root", [".", "..", "../.."])
def test_the_logo_leads_to_a_page_not_to_a_folder(root):
    logo = '<a href="{}" title="fedbandit" class="md-header__button md-logo">'
    page = logo.format(root) + f'<a href="{root}" class="other">'
    assert (
        on_post_page(page) == logo.format(f"{root}/index.html") + f'<a href="{root}" class="other">'
    )
