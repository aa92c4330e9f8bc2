"""Debian's Chromium without a window, driven by Debian's chromedriver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from axe_core_python.selenium import Axe
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.common.by import By

from tmc_storm.eventually import eventually

WIDTHS = {"desktop": 1300, "phone": 390}


class Chromium:
    """What a person does: look, click, type."""

    def __init__(self, driver: Any, base: str) -> None:
        self.driver = driver
        self.base = base

    def open(self, path: str) -> None:
        self.driver.get(self.base + path)

    @property
    def text(self) -> str:
        """What is visible; "" while a page is loading."""
        return str(self.driver.execute_script("return document.body ? document.body.innerText : ''"))

    def first(self, css: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def has(self, css: str) -> bool:
        return bool(self.driver.find_elements(By.CSS_SELECTOR, css))

    def click(self, text: str, css: str = "a, button, summary") -> None:
        """The first visible link or button with exactly this text, once the page has it."""
        self._with_visible(css, lambda each: each.text.strip() == text, lambda each: each.click())

    def type(self, name: str, text: str) -> None:
        """Into the first visible field of this name."""
        self._with_visible(f"[name={name}]", lambda _each: True, lambda each: each.send_keys(text))

    def _with_visible(self, css: str, wanted: Callable[[Any], bool], act: Callable[[Any], None]) -> None:
        def acted() -> bool:
            try:
                for each in self.driver.find_elements(By.CSS_SELECTOR, css):
                    if each.is_displayed() and wanted(each):
                        act(each)
                        return True
            except WebDriverException as exc:  # the next page is loading, which the driver says in two ways
                if isinstance(exc, StaleElementReferenceException) or "not belong to the document" in str(exc):
                    return False
                raise
            return False

        eventually(acted, seconds=60, describe=lambda: f"{css} on {self.driver.current_url}: {self.text[:2000]}")

    def press(self, keys: str) -> None:
        self.first("body").send_keys(keys)

    def colors(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, name: str) -> None:
        metrics = {"width": WIDTHS[name], "height": 900, "deviceScaleFactor": 1, "mobile": name == "phone"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def complaints(self) -> list[str]:
        """What axe-core finds serious or critical, and what the browser refused or could not run."""
        found = [
            f"{each['impact']} {each['id']}: {each['nodes'][0]['html'][:200]}"
            for each in Axe().run(self.driver)["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        log = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [*found, *log]

    def overflows(self) -> bool:
        """Is the page wider than the window?"""
        script = "return document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"
        return bool(self.driver.execute_script(script))


@contextmanager
def chromium(base: str) -> Iterator[Chromium]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield Chromium(driver, base)
    finally:
        driver.quit()
