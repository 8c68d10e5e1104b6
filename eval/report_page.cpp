#include <fmt/format.h>

#include "eval/embedded.h"
#include "eval/report.h"

namespace ebb {
namespace {

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// JSON that cannot end the element it stands in, whatever its strings say.
std::string script_safe(const nlohmann::json& data) {
  std::string out;
  for (char c : data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))
    c == '<' ? out += "\\u003c" : out += c;
  return out;
}

}  // namespace

std::string report_page(const nlohmann::json& data, const std::string& title,
                        const std::string& about) {
  std::string page = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>\n{}</style>\n</head>\n<body>\n"
      "<header><h1>{}</h1><p class=\"quiet\">{}</p><nav id=\"contents\"></nav></header>\n"
      "<main id=\"page\"><noscript><p>The charts and tables of this page are drawn by its own "
      "scripts; please allow them.</p></noscript></main>\n",
      escaped(title), embedded::report_css(), escaped(title), escaped(about));
  page += "<script type=\"application/json\" id=\"data\">" + script_safe(data) + "</script>\n";
  page += "<script>\n";
  page += embedded::echarts();
  page += "\n</script>\n<script>\n";
  page += embedded::report_js();
  page += "</script>\n</body>\n</html>\n";
  return page;
}

}  // namespace ebb
