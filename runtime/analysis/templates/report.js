(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("report-data").textContent);

  // Colours are names of CSS variables, so that one page serves both colour schemes.
  function resolve(value, style) {
    if (typeof value === "string") {
      return value.slice(0, 2) === "--" ? style.getPropertyValue(value).trim() : value;
    }
    if (Array.isArray(value)) {
      return value.map(function (item) { return resolve(item, style); });
    }
    if (value && typeof value === "object") {
      var out = {};
      Object.keys(value).forEach(function (key) { out[key] = resolve(value[key], style); });
      return out;
    }
    return value;
  }

  function axis(given, css) {
    var base = {
      gridcolor: css("--grid"), linecolor: css("--border"), zeroline: false, automargin: true,
      tickfont: { color: css("--muted"), size: 11 }, ticks: "",
    };
    Object.keys(given || {}).forEach(function (key) { base[key] = given[key]; });
    base.title = { text: (given && given.title && given.title.text) || "", standoff: 8,
                   font: { color: css("--ink-2"), size: 12 } };
    return base;
  }

  function draw() {
    var style = getComputedStyle(document.documentElement);
    function css(name) { return style.getPropertyValue(name).trim(); }
    document.querySelectorAll("[data-chart]").forEach(function (element) {
      var chart = data[element.getAttribute("data-chart")];
      var given = resolve(chart.layout, style);
      var named = chart.traces.filter(function (t) { return t.name && t.showlegend !== false; });
      var layout = Object.assign({ hovermode: "x unified" }, given, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 48, r: 12, t: 8, b: 40 },
        font: { family: getComputedStyle(document.body).fontFamily, color: css("--ink-2"), size: 12 },
        showlegend: named.length > 1,
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
        hoverlabel: { bgcolor: css("--surface"), bordercolor: css("--border"), font: { color: css("--ink") } },
        xaxis: axis(given.xaxis, css), yaxis: axis(given.yaxis, css),
      });
      Plotly.react(element, resolve(chart.traces, style), layout,
                   { responsive: true, displayModeBar: false, showLink: false });
    });
  }

  draw();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
